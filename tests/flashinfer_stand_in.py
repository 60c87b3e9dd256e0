"""FlashInfer's wrappers and a GPU's stream as they are documented, on tensors of the CPU.

Copies out of pinned memory wait in a queue until the stream is made to go on: by an event that the
host waits for, by a launch, or by `catch_up` ahead of what torch computes at once. So what is
overwritten too early gives wrong results here, as on a GPU. Wrong dtypes, wrong places, runs
before plans and plans over cuts not yet fetched raise.
"""

from typing import Any

import torch
from torch import Tensor

from adapters.attention.flashinfer.ports import (
    CapturedBuffers,
    DecodeKernels,
    MergeParts,
    RopeAndCacheWrite,
    RunsPaged,
)
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import rope_and_cache_write
from engine.worker.ports import AttentionSpec
from tests.flashinfer_latents import StandInLatents
from tests.flashinfer_stream import StandInStream
from tests.flashinfer_wrappers import StandInCaptured, StandInMixed, StandInWrapper


class StandIn(StandInStream):
    """See `Library`."""

    num_processors = 4

    def __init__(self, *, has_decode_kernels: bool = True) -> None:
        super().__init__()
        self._has_decode_kernels = has_decode_kernels

    def compile(self, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
        """There is nothing to compile."""

    def mixed(self, workspace: Tensor, buffers: CapturedBuffers | None = None) -> StandInMixed:
        self.check_device("workspace", workspace, torch.uint8)
        return StandInMixed(self, workspace, buffers)

    def captured(self, workspace: Tensor, buffers: CapturedBuffers) -> StandInCaptured:
        self.check_device("workspace", workspace, torch.uint8)
        return StandInCaptured(self, workspace, buffers)

    def latents(self, dtype: torch.dtype) -> StandInLatents:
        return StandInLatents(self, self.num_processors)

    def baked(self, wrapper: RunsPaged) -> tuple[int, ...]:
        assert isinstance(wrapper, StandInWrapper)
        assert wrapper.size, "a wrapper that is not for graphs"
        return wrapper.parts_rows, wrapper.size

    def rope_and_cache_write(self, kept: torch.dtype) -> RopeAndCacheWrite:
        """The kernel's reference."""

        def write(*given: Any) -> None:
            self.calls.append(("rope_and_cache_write", {}))
            self.catch_up()
            rope_and_cache_write(*given)

        return write

    def merge_parts(self) -> MergeParts:
        """The kernel's reference."""
        return self._merging(reference.merge_parts)

    def _merging(self, plain: MergeParts) -> MergeParts:
        def merge(
            found: Tensor, sums: Tensor, first: Tensor, out: Tensor, sinks: Tensor | None
        ) -> None:
            self.calls.append((plain.__name__, {"first": first}))
            self.check_device("first", first, torch.int32)
            assert all(each.is_contiguous() for each in (found, sums, out))
            self.catch_up()
            plain(found, sums, first, out, sinks)

        return merge

    def decode_kernels(self) -> DecodeKernels | None:
        """The references of the kernels."""
        if not self._has_decode_kernels:
            return None

        def attend(*given: Any) -> None:
            read = given[3]
            self.calls.append(("attend_decodes", {"runs": read.runs, "pages": read.pages}))
            self.check_device("runs", read.runs, torch.int32)
            self.check_device("pages", read.pages, torch.int32)
            assert all(each.is_contiguous() for each in (given[4], *given[5]))
            self.catch_up()
            for each in given[5]:
                each.fill_(torch.nan)
            reference.attend_decodes(*given)

        return DecodeKernels(attend, self._merging(reference.merge_runs))
