"""Attention in plain torch, one request after the other: slow, short and right.

The oracle of the contract suite; every other backend is held to it.
"""

import torch
from torch import Tensor

from engine.worker.kv_tensors import KVTensors
from engine.worker.layout import RaggedLayout
from engine.worker.ports import AttentionSpec, Team, Turn


class ReferenceAttention:
    """Gathers the pages of a request, masks, softmax in float32."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors, team: Team) -> None:
        self._spec = spec
        self._cache = cache
        self._place = cache.keys[0].device
        self._slots = torch.empty(0, dtype=torch.int64)
        self._layout: RaggedLayout | None = None  # of the running step, from `plan` on

    def plan(self, layout: RaggedLayout) -> None:
        """See `AttentionBackend`."""
        self._layout = layout
        self._slots = torch.from_numpy(layout.slots).to(self._place)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn | None) -> Tensor:
        """See `AttentionBackend`."""
        layout = self._layout
        assert layout is not None, "plan comes before run"
        if turn is not None:
            q, k = _turned(q, turn), _turned(k, turn)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, k.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, self._slots, v.to(values.dtype))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for i in range(layout.num_requests):
            rows = slice(int(layout.qo_indptr[i]), int(layout.qo_indptr[i + 1]))
            pages = torch.from_numpy(
                layout.kv_indices[layout.kv_indptr[i] : layout.kv_indptr[i + 1]]
            ).to(self._place)
            length = int(layout.kv_len[i])
            out[rows] = self._attend(
                q[rows], keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length]
            )
        return out

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        spec, length = self._spec, len(keys)
        group = spec.num_heads // spec.num_kv_heads
        keys = keys.float().repeat_interleave(group, dim=1)
        values = values.float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * spec.scale
        ends = torch.arange(length - len(q), length, device=self._place)
        distance = ends[:, None] - torch.arange(length, device=self._place)
        seen = distance >= 0
        if spec.window is not None:
            seen &= distance < spec.window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _turned(heads: Tensor, turn: Turn) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    cos, sin = turn.cos[:, None], turn.sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)
