"""RoPE and writing new keys and values to the paged KV cache by slot, in one launch where there
is a kernel for both, else in three.

FlashInfer's own append kernel is not used: it needs two more tables per step, does not quantize to
fp8, and reads out of bounds for padding rows. The layout has a slot for every row, padding
included.
"""

import torch
from torch import Tensor

from adapters.attention.flashinfer import fp8
from adapters.attention.flashinfer.ports import Library
from engine.worker.cuda.kernels.reference import CacheRows
from engine.worker.ports import AttentionSpec, KVTensors, RopeAngles, as_bytes


class RopeAndWrite:
    """RoPE and the cache write of each layer; layers run in order, layer 0 first."""

    def __init__(
        self, library: Library, spec: AttentionSpec, cache: KVTensors, max_tokens: int
    ) -> None:
        self._fused = library.rope_and_cache_write(cache.keys[0].dtype)
        self._pages = tuple(
            (_slots(keys), _slots(values))
            for keys, values in zip(cache.keys, cache.values, strict=True)
        )
        self._scales = spec.k_scale, spec.v_scale
        self._writer = RowWriter(spec, cache)
        self._rope = ApplyRope(library, max_tokens)

    def __call__(
        self,
        layer: int,
        slots: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        rope: RopeAngles | None,
        *,
        is_contiguous: bool = False,
    ) -> Tensor:
        """Write k, rotated, and v to `slots`, int64 `[tokens]`; returns the rotated q, either q
        itself or a contiguous copy."""
        q, k, v = qkv
        is_whole = rope is None or 2 * rope.cos.shape[1] == q.shape[-1]
        if self._fused is not None and is_whole:
            angles = None if rope is None else (rope.cos, rope.sin)
            cache = CacheRows(slots, *self._pages[layer], *self._scales)
            q_out = q.new_empty(q.shape) if is_contiguous else None
            self._fused(q, k, v, angles, cache, q_out)
            return q if q_out is None else q_out
        if rope is not None:
            self._rope.apply(layer, q, k, rope)
        self._writer.write(layer, slots, k, v)
        return q.contiguous() if is_contiguous else q


class RowWriter:
    """Writes rows of k and v `[tokens, heads, dim]` to slots, in the dtype of the cache."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors) -> None:
        self._scales = spec.k_scale, spec.v_scale
        self._keys = tuple(as_bytes(_slots(each)) for each in cache.keys)
        self._values = tuple(as_bytes(_slots(each)) for each in cache.values)
        self._is_fp8 = cache.keys[0].dtype == fp8.FP8

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one layer's rows; `slots` are int64 `[tokens]` on the device."""
        if self._is_fp8:
            k, v = (
                as_bytes(fp8.quantize(rows, scale))
                for rows, scale in zip((k, v), self._scales, strict=True)
            )
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)


def _slots(pages: Tensor) -> Tensor:
    """The pages as `[slots, heads, dim]`, a view; raises if the slots are not contiguous."""
    return pages.view(-1, *pages.shape[2:])


class ApplyRope:
    """Applies RoPE to q and k with one kernel per layer, from a cos/sin table made once a step.

    Layer 0 always makes the table, so that every CUDA graph contains its computation.
    """

    def __init__(self, library: Library, max_tokens: int) -> None:
        self._library = library
        self._rows = library.on_device(max_tokens, torch.int32)
        torch.arange(max_tokens, out=self._rows)
        self._cos_sin = self._rows.new_empty(0, dtype=torch.float32)
        self._angles: RopeAngles | None = None  # those of the current table

    def apply(self, layer: int, q: Tensor, k: Tensor, angles: RopeAngles) -> None:
        """Rotate q and k `[tokens, heads, dim]` in place; layers run in order, layer 0 first."""
        if layer == 0 or angles is not self._angles:
            self._angles = angles
            self._cos_sin = torch.cat((angles.cos, angles.sin), dim=-1).float()
        self._library.apply_rope(q, k, self._cos_sin, self._rows[: len(q)])
