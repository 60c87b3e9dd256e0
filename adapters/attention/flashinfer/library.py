"""FlashInfer and torch.cuda behind `Library`: the one place that imports FlashInfer.

The import reads its settings from the environment, compiles nothing, and initialises CUDA in this
process; kernels are compiled, or found in the cache, when a wrapper is first planned.
"""

import importlib
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from adapters.attention.flashinfer.ports import (
    CapturedBuffers,
    CapturedWrapper,
    CudaEvent,
    MixedWrapper,
)
from engine.errors import StartupError

LAYOUT = "NHD"  # pages of [tokens, heads, dim]
KERNELS = "fa2"  # tensor cores everywhere, and one module for prompts and decodes


class FlashInfer:
    """The library on one GPU, which is the current device of this process."""

    def __init__(self, device: torch.device) -> None:
        """Raises `StartupError` with one line if FlashInfer cannot be imported."""
        try:
            package = importlib.import_module("flashinfer")
        except ImportError as error:
            raise StartupError(f"flashinfer cannot be imported: {error}") from error
        self._mixed = package.BatchPrefillWithPagedKVCacheWrapper
        self._captured = package.BatchDecodeWithPagedKVCacheWrapper
        self._turn = cast(
            "Callable[[Tensor, Tensor, Tensor, int, Tensor, bool], None]",
            package.apply_rope_with_cos_sin_cache_inplace,
        )
        self._device = device

    @property
    def num_processors(self) -> int:
        """See `Library`."""
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def on_device(self, size: int, dtype: torch.dtype) -> Tensor:
        """See `Library`; zeros, as a workspace must be at first."""
        return torch.zeros(size, dtype=dtype, device=self._device)

    def pinned(self, num_bytes: int) -> Tensor:
        """See `Library`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Library`."""
        target.copy_(source, non_blocking=True)

    def event(self) -> CudaEvent:
        """See `Library`."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call] # the stubs lack it

    def mixed(self, workspace: Tensor) -> MixedWrapper:
        """See `Library`."""
        return cast(MixedWrapper, self._mixed(workspace, LAYOUT, backend=KERNELS))

    def captured(self, workspace: Tensor, buffers: CapturedBuffers) -> CapturedWrapper:
        """See `Library`."""
        wrapper = self._captured(
            workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.indptr,
            paged_kv_indices_buffer=buffers.indices,
            paged_kv_last_page_len_buffer=buffers.last_page_len,
            backend=KERNELS,
        )
        return cast(CapturedWrapper, wrapper)

    def baked(self, wrapper: CapturedWrapper) -> tuple[int, ...]:
        """See `Library`."""
        return tuple(int(each) for each in wrapper._plan_info)  # type: ignore[attr-defined]

    def turn(self, q: Tensor, k: Tensor, cos_sin: Tensor, rows: Tensor) -> None:
        """See `Library`."""
        tokens, _, dim = q.shape
        self._turn(rows, q.view(tokens, -1), k.view(tokens, -1), dim, cos_sin, True)
