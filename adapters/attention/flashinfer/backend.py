"""Attention on NVIDIA GPUs by FlashInfer, directly over the paged KV cache.

A step is one launch per layer for prefills and decodes together, a decode being a prefill of one
token. A Triton kernel of ours computes steps of decodes alone. Steps can be captured in CUDA
graphs; those with prompts have the smallest tiles then, as all steps in batch-invariant mode.
`plan` runs once a step on the host: it splits the work, fills pinned tables and starts their
copies; `run` only submits kernels to the stream. The host waits for the device only if the table
copies of three steps ago are not done.
"""

import torch
from torch import Tensor

from adapters.attention.flashinfer.captured import HeadLaunches
from adapters.attention.flashinfer.decodes import plan_bytes
from adapters.attention.flashinfer.fit import missing_requirement, unsupported_shape
from adapters.attention.flashinfer.latents import PLAN_BYTES, LatentLaunches
from adapters.attention.flashinfer.launches import Geometry, Launch, Launches, Sinks
from adapters.attention.flashinfer.library import FlashInfer
from adapters.attention.flashinfer.ports import Library
from adapters.attention.flashinfer.tables import PageTableArena, PageTableArenas, PageTables
from adapters.attention.flashinfer.workspace import check_limits
from engine.errors import StartupError
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import CacheRows
from engine.worker.ports import AttentionSpec, KVTensors, RaggedLayout, RopeAngles, ThreadPool

NUM_ARENAS = 3


class FlashInferAttention:
    """A `CapturableAttention` by FlashInfer. All calls use one stream; the thread pool is
    unused."""

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVTensors,
        pool: ThreadPool,
        library: Library | None = None,
    ) -> None:
        """Raises `StartupError` if the model's shape, the machine or a limit is not supported."""
        if library is None:
            if reason := self.why_not(spec, cache.keys[0].dtype, cache.block_size):
                raise StartupError(f"attention 'flashinfer' cannot be used: {reason}")
            library = FlashInfer(cache.keys[0].device, spec.dtype, spec.choices)
        assert spec.limits is not None, "attention on a GPU needs the step limits"
        kv_dtype = cache.keys[0].dtype
        library.compile(spec, kv_dtype)
        group = spec.num_heads // spec.num_kv_heads
        sizes = check_limits(spec.limits, cache.block_size, group)
        self._library = library
        self._geometry = Geometry.of(spec, cache)
        values = cache.keys if spec.values_from is not None else cache.values  # a part of the keys
        self._rows_of_pages = tuple(zip(cache.keys, values, strict=True))
        self._pages = tuple(
            (widened(keys, self._geometry.head_dim), widened(values, self._geometry.head_dim))
            for keys, values in self._rows_of_pages
        )
        self._slots = library.on_device(sizes.tokens, torch.int64)
        num_bytes = sizes.arena_bytes + (
            plan_bytes(sizes.rows, spec.num_kv_heads, library)
            if spec.values_from is None
            else PLAN_BYTES
        )
        self._arenas = PageTableArenas(
            [PageTableArena(library.pinned(num_bytes), library.event()) for _ in range(NUM_ARENAS)]
        )
        self._write = library.rope_and_cache_write(kv_dtype)
        self._scales = spec.k_scale, spec.v_scale
        self._merge = library.merge_parts() or reference.add_sinks
        self._first = library.on_device(sizes.tokens + 1, torch.int32)
        self._first.copy_(torch.arange(sizes.tokens + 1, dtype=torch.int32))
        launches = HeadLaunches if spec.values_from is None else LatentLaunches
        self._launches: Launches = launches(library, self._geometry, sizes, spec.limits)
        self._launch: Launch = self._launches.mixed  # the current step's, set by `plan`
        self._rows = 0  # rows in the current step

    @staticmethod
    def why_not(spec: AttentionSpec, kv_dtype: torch.dtype, block_size: int) -> str:
        """Why FlashInfer cannot serve this shape or machine, in one line; empty if it can."""
        return unsupported_shape(spec, kv_dtype, block_size) or missing_requirement(
            torch.cuda.device_count()
        )

    def plan(self, layout: RaggedLayout) -> None:
        """Plan the launch of a step and start the copies of its tables."""
        launches = self._launches
        self._plan(launches.decodes if layout.is_decode_only else launches.mixed, layout)

    def plan_captured(self, layout: RaggedLayout) -> tuple[int, ...]:
        """Plan a step for the graph of its kind and size; the plan's values that the graph contains
        as constants."""
        launches = self._launches
        launch = launches.captured(layout.num_tokens, is_mixed=not layout.is_decode_only)
        self._plan(launch, layout)
        return launch.baked(self._library)

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: RopeAngles | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """RoPE, cache write and attention of one layer; q, k, v `[tokens, heads, dim]`."""
        assert len(q) == self._rows, "plan comes before run"
        geometry, (heads, dim) = self._geometry, q.shape[1:]
        q = self._rope_and_write(layer, q, k, v, rope)
        out = torch.empty((*q.shape[:2], geometry.value_dim), dtype=q.dtype, device=q.device)
        of_layer = None if sinks is None else Sinks(sinks, self._first, self._merge)
        self._launch.run(q, self._pages[layer], out, of_layer)
        dim -= geometry.spec.values_from or 0
        return out[:, :heads, :dim].contiguous()

    def _rope_and_write(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, rope: RopeAngles | None
    ) -> Tensor:
        """Write k, rotated, and v, if any, to the cache; returns the rotated q, itself or a
        contiguous copy with the heads of the kernel. What it has more of them is not used.

        FlashInfer's own append kernel needs two more tables per step, does not quantize to fp8, and
        reads out of bounds for padding rows. The layout has a slot for every row, padding included.
        """
        cache = CacheRows(self._slots[: len(q)], *self._rows_of_pages[layer], *self._scales)
        angles = None if rope is None else (rope.cos, rope.sin)
        count, wanted = q.shape[1], (self._geometry.num_heads, self._geometry.head_dim)
        if wanted == q.shape[1:]:
            self._write(q, k, v, angles, cache, None)
            return q
        whole = q.new_empty((len(q), *wanted))
        self._write(q, k, v, angles, cache, whole[:, :count])
        return whole

    def _plan(self, launch: Launch, layout: RaggedLayout) -> None:
        with self._arenas.next() as arena:
            launch.plan(arena, PageTables.of(layout), self._upload(arena, layout))
        self._launch = launch

    def _upload(self, arena: PageTableArena, layout: RaggedLayout) -> Tensor:
        """Start the copies of slots and page indices to the device; returns the page indices."""
        self._rows = layout.num_tokens
        indices = self._launches.indices[: len(layout.kv_indices)]
        self._library.copy(indices, arena.put(layout.kv_indices))
        self._library.copy(self._slots[: self._rows], arena.put(layout.slots))
        return indices


def widened(pages: Tensor, dim: int) -> Tensor:
    """A view of pages in which each head has the numbers behind it too, up to `dim`.

    The kernel multiplies them by zeros of q, and their outputs are not used. The device has as many
    numbers behind each page as a head is narrower than the kernel's (`GpuMemory.kv`).
    """
    return pages.as_strided((*pages.shape[:3], dim), pages.stride())
