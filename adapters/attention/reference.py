"""Attention in plain torch, one request at a time: slow, short and correct.

The oracle of the contract suite, which compares every other backend with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.worker.cuda.kernels.reference import FP8, fp8_of
from engine.worker.ports import (
    AttentionSpec,
    KVTensors,
    RaggedLayout,
    RopeAngles,
    ThreadPool,
    as_bytes,
)

TINY = torch.finfo(torch.float32).tiny
MAX_FLOAT16 = torch.finfo(torch.float16).max


class _Pages(NamedTuple):
    """One layer's keys or values."""

    pages: Tensor  # [num_blocks, block_size, kv_heads, dim]
    scales: Tensor | None  # [num_blocks, block_size, kv_heads]
    scale: float  # the scale of 8-bit floats

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows `[tokens, kv_heads, dim]` to their slots in the dtype of the cache."""
        size = self.pages.shape[1]
        at = slots // size, slots % size
        if self.scales is not None:
            scales = rows.abs().amax(dim=-1) / 127
            self.scales[at] = scales
            rows = (rows / scales.clamp_min(TINY)[..., None]).round_()
        if self.pages.dtype == FP8:
            rows = fp8_of(rows, self.scale)
        if self.pages.dtype == torch.float16:
            rows = rows.clamp(-MAX_FLOAT16, MAX_FLOAT16)
        as_bytes(self.pages)[at] = as_bytes(rows.to(self.pages.dtype))

    def read(self, blocks: Tensor, length: int) -> Tensor:
        """The first `length` tokens of these blocks, `[length, kv_heads, dim]` in float32."""
        found = as_bytes(self.pages)[blocks].view(self.pages.dtype)
        rows = found.flatten(0, 1)[:length].float()
        if self.pages.dtype == FP8:
            return rows * self.scale
        if self.scales is None:
            return rows
        return rows * self.scales[blocks].flatten(0, 1)[:length, :, None]


class ReferenceAttention:
    """Gathers the pages of each request; mask and softmax in float32."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors, pool: ThreadPool) -> None:
        self._spec = spec
        self._cache = cache
        self._place = cache.keys[0].device
        self._slots = torch.empty(0, dtype=torch.int64)
        self._layout: RaggedLayout | None = None  # the current step's, set by `plan`

    def plan(self, layout: RaggedLayout) -> None:
        """Keep the layout and slots of the step."""
        self._layout = layout
        self._slots = torch.from_numpy(layout.slots).to(self._place)

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
        layout = self._layout
        assert layout is not None, "plan comes before run"
        keys, values = self._pages_of(layer)
        if k is not None:
            keys.write(self._slots, k if rope is None else _rotated(k, rope))
        if v is not None and values is not None:
            values.write(self._slots, v)
        q = q if rope is None else _rotated(q, rope)
        out = q.new_empty((*q.shape[:2], self._spec.value_dim))
        for i in range(layout.num_requests):
            rows = slice(int(layout.qo_indptr[i]), int(layout.qo_indptr[i + 1]))
            pages = torch.from_numpy(
                layout.kv_indices[layout.kv_indptr[i] : layout.kv_indptr[i + 1]]
            ).to(self._place)
            length = int(layout.kv_len[i])
            found = keys.read(pages, length)
            mixed = (
                found[..., self._spec.values_from :]
                if values is None
                else values.read(pages, length)
            )
            ends = self._image_ends(layout, rows)
            out[rows] = self._attend(q[rows], found, mixed, sinks, ends)
        return out

    def _pages_of(self, layer: int) -> tuple[_Pages, _Pages | None]:
        cache, spec = self._cache, self._spec
        key_scales = cache.key_scales[layer] if cache.key_scales else None
        value_scales = cache.value_scales[layer] if cache.value_scales else None
        keys = _Pages(cache.keys[layer], key_scales, spec.k_scale)
        if not cache.values:
            return keys, None
        return keys, _Pages(cache.values[layer], value_scales, spec.v_scale)

    def _image_ends(self, layout: RaggedLayout, rows: slice) -> Tensor:
        """The position behind the image that each row of a request belongs to; 0 of text."""
        ends = torch.zeros(rows.stop - rows.start, dtype=torch.int64)
        for _, start, _, count in layout.encoded if self._spec.sees_images else ():
            if rows.start <= start < rows.stop:
                first = start - rows.start
                ends[first : first + count] = int(layout.positions[start + count - 1]) + 1
        return ends.to(self._place)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, image_ends: Tensor
    ) -> Tensor:
        spec, length = self._spec, len(keys)
        group = spec.num_heads // spec.num_kv_heads
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * spec.scale
        if spec.soft_cap is not None:
            scores = (scores / spec.soft_cap).tanh_() * spec.soft_cap
        ends = torch.arange(length - len(q), length, device=self._place)
        distance = ends[:, None] - torch.arange(length, device=self._place)
        seen = distance >= -spec.tokens_ahead
        seen |= torch.arange(length, device=self._place) < image_ends[:, None]
        if spec.window is not None:
            seen &= distance < spec.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _rotated(heads: Tensor, rope: RopeAngles) -> Tensor:
    """RoPE of the first dimensions of each head; the others stay as they are."""
    half = rope.cos.shape[1]
    sizes = [half, half, heads.shape[-1] - 2 * half]
    first, second, rest = torch.split(heads, sizes, dim=-1)
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated.to(heads.dtype)
