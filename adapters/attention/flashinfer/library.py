"""The only module that imports FlashInfer; implements `Library` on a real GPU.

The import reads environment variables and initialises CUDA in this process; it compiles nothing.
Kernels are compiled, or loaded from FlashInfer's cache, when a wrapper is first planned.
"""

import importlib
import logging
from typing import Any, cast

import torch
from torch import Tensor

from adapters.attention.flashinfer.modules import (
    Build,
    attention_module,
    build_side_by_side,
    mla,
)
from adapters.attention.flashinfer.ports import (
    AttendDecodes,
    CapturedBuffers,
    CapturedWrapper,
    DecodeKernels,
    DeviceEvent,
    LatentKernels,
    MergeParts,
    MixedWrapper,
    RopeAndCacheWrite,
    RunsPaged,
)
from engine.errors import StartupError
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.library import has_fp8, load
from engine.worker.cuda.kernels.reference import FP8
from engine.worker.ports import AttentionSpec

logger = logging.getLogger(__name__)

LAYOUT = "NHD"  # pages are [tokens, heads, dim]
KERNELS = "fa2"  # tensor-core kernels, one module for prefill and decode


class FlashInfer:
    """FlashInfer on the current GPU of this process."""

    def __init__(self, device: torch.device, dtype: torch.dtype, choices: str) -> None:
        """`choices` is the directory of files about kernels. Raises `StartupError` if FlashInfer
        cannot be imported."""
        try:
            package = importlib.import_module("flashinfer")
        except ImportError as error:
            raise StartupError(f"flashinfer cannot be imported: {error}") from error
        self._mixed = package.BatchPrefillWithPagedKVCacheWrapper
        self._captured = package.BatchDecodeWithPagedKVCacheWrapper
        self._device = device
        kernels = load(device, dtype, choices)
        self._write, self._parts = kernels.rope_and_cache_write, kernels.parts
        self._decodes = kernels.decode_attention

    @property
    def num_processors(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the GPU."""
        return torch.cuda.get_device_capability(self._device)

    def compile(self, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
        """Build what is missing; a module that fails is built again at its first use."""
        build = Build([attention_module(spec, kv_dtype, self.capability)], logger.info)
        if build.missing:
            logger.info("compiling FlashInfer's attention")
            build.run(build_side_by_side)

    def on_device(self, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros: FlashInfer needs zeroed workspaces."""
        return torch.zeros(size, dtype=dtype, device=self._device)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> DeviceEvent:
        return torch.cuda.Event()  # type: ignore[no-untyped-call] # the stubs lack it

    def mixed(self, workspace: Tensor, buffers: CapturedBuffers | None = None) -> MixedWrapper:
        """A prefill wrapper that works in this workspace, for CUDA graphs over fixed buffers."""
        if buffers is None:
            return cast(MixedWrapper, self._mixed(workspace, LAYOUT, backend=KERNELS))
        wrapper = self._mixed(
            workspace,
            LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf=buffers.qo_indptr,
            paged_kv_indptr_buf=buffers.indptr,
            paged_kv_indices_buf=buffers.indices,
            paged_kv_last_page_len_buf=buffers.last_page_len,
            backend=KERNELS,
        )
        return cast(MixedWrapper, wrapper)

    def captured(self, workspace: Tensor, buffers: CapturedBuffers) -> CapturedWrapper:
        """A decode wrapper for CUDA graphs over these fixed buffers."""
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

    def latents(self, dtype: torch.dtype) -> LatentKernels:
        module: Any = mla(dtype, self.capability)
        return cast(LatentKernels, module.build_and_load())

    def baked(self, wrapper: RunsPaged) -> tuple[int, ...]:
        return tuple(int(each) for each in wrapper._plan_info)  # type: ignore[attr-defined]

    def rope_and_cache_write(self, kept: torch.dtype) -> RopeAndCacheWrite:
        """Our Triton kernel, if it is verified on this GPU, else torch."""
        if self._write is None or (kept == FP8 and not has_fp8(self._device)):
            return reference.rope_and_cache_write
        return cast(RopeAndCacheWrite, self._write.rope_and_cache_write)

    def merge_parts(self) -> MergeParts | None:
        """Our Triton kernel, if it is verified on this GPU."""
        return None if self._parts is None else cast(MergeParts, self._parts.merge_parts)

    def decode_kernels(self) -> DecodeKernels | None:
        """Our Triton kernels, if they are verified on this GPU."""
        if self._decodes is None or self._parts is None:
            return None
        attend = cast(AttendDecodes, self._decodes.attend_decodes)
        return DecodeKernels(attend, cast(MergeParts, self._parts.merge_runs))
