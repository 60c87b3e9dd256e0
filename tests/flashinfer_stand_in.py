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
    MergeParts,
    RopeAndCacheWrite,
    RunsPaged,
)
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import rope_and_cache_write
from engine.worker.ports import AttentionSpec
from tests.flashinfer_stream import StandInStream
from tests.flashinfer_wrappers import StandInCaptured, StandInMixed, StandInWrapper


class StandIn(StandInStream):
    """See `Library`."""

    num_processors = 4
    names = ("Standing GPU", "flashinfer", "0")

    def __init__(self, *, capability: tuple[int, int] = (8, 0)) -> None:
        """XQA needs capability (9, 0)."""
        super().__init__()
        self.capability = capability
        self.packed_error = ""  # that XQA raises
        self.packed_faults = False  # whether XQA leaves a device that computes nothing more
        self.packed_factor = 1.0  # of its results
        self.compiled: list[tuple[int, bool]] = []  # tokens of a block, and whether for XQA too

    def compile(
        self, spec: AttentionSpec, kv_dtype: torch.dtype, page_size: int, *, with_xqa: bool
    ) -> None:
        self.compiled.append((page_size, with_xqa))

    def packed_decode(self, workspace: Tensor) -> "StandInPacked":
        self.check_device("workspace", workspace, torch.uint8)
        return StandInPacked(self, workspace)

    def mixed(self, workspace: Tensor, buffers: CapturedBuffers | None = None) -> StandInMixed:
        self.check_device("workspace", workspace, torch.uint8)
        return StandInMixed(self, workspace, buffers)

    def captured(self, workspace: Tensor, buffers: CapturedBuffers) -> StandInCaptured:
        self.check_device("workspace", workspace, torch.uint8)
        return StandInCaptured(self, workspace, buffers)

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

        def merge(
            found: Tensor, sums: Tensor, first: Tensor, out: Tensor, sinks: Tensor | None
        ) -> None:
            self.calls.append(("merge_parts", {"first": first}))
            self.check_device("first", first, torch.int32)
            assert all(each.is_contiguous() for each in (found, sums, out))
            self.catch_up()
            reference.merge_parts(found, sums, first, out, sinks)

        return merge


class StandInPacked:
    """See `PackedDecode`: attention by the dense page table, with q as it lies in memory."""

    def __init__(self, stand_in: StandIn, workspace: Tensor) -> None:
        self._stand_in = stand_in
        self._workspace = workspace

    def __call__(self, **given: Any) -> None:
        stand_in, q, out = self._stand_in, given["query"], given["out"]
        stand_in.calls.append(("xqa", given))
        stand_in.now += stand_in.slowness["xqa"]
        stand_in.catch_up()
        stand_in.has_faulted |= stand_in.packed_faults
        stand_in.synchronize()
        if stand_in.packed_error:
            raise RuntimeError(stand_in.packed_error)
        tables, lengths = given["block_tables"], given["seq_lens"]
        stand_in.check_device("block_tables", tables, torch.int32)
        stand_in.check_device("seq_lens", lengths, torch.uint32)
        assert len(self._workspace) > 8 << 20, "the semaphores alone take 8 MiB"
        keys, values = given["kv_cache"]
        assert q.is_contiguous(), "the kernel knows no strides of q"
        assert out.is_contiguous()
        assert keys.dtype == values.dtype == q.dtype == out.dtype
        assert given["kv_layout"] == "NHD"
        assert tables.shape == (len(q), given["max_seq_len"] // keys.shape[1])
        assert 0 <= int(tables.min()) <= int(tables.max()) < len(keys), "pages outside of the cache"
        scale, group = given["bmm1_scale"], q.shape[1] // keys.shape[2]
        for row, length in enumerate(lengths.view(torch.int32).tolist()):
            pages = tables[row, : -(-length // keys.shape[1])].long()
            k, v = (
                each[pages].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
                for each in (keys, values)
            )
            if (window := given["window_left"]) >= 0:
                k, v = k[-window - 1 :], v[-window - 1 :]
            weights = (torch.einsum("hd,khd->hk", q[row].double(), k) * scale).softmax(-1)
            found = torch.einsum("hk,khd->hd", weights, v) * given["bmm2_scale"]
            out[row] = (found * stand_in.packed_factor).to(out.dtype)
