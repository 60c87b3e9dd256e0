"""New keys and values on their way into the paged cache: turned, rounded, written by slot.

FlashInfer's append is not used: it wants two more tables per step, rounds nothing to 8 bits, and
reads out of bounds for rows that belong to no request. Slots are in the layout anyway, and rows of
padding have one, too.
"""

import torch
from torch import Tensor

from adapters.attention.flashinfer_ports import Library
from engine.worker.kv_tensors import KVTensors
from engine.worker.ports import AttentionSpec, Turn

MOST_FP8 = 448.0  # of e4m3, which has no infinity: whatever is beyond becomes this


class RowWriter:
    """Writes rows of k or v `[tokens, heads, dim]` into slots, in the dtype of the cache."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors) -> None:
        self._dtype = cache.keys[0].dtype
        self._is_rounded = self._dtype != spec.dtype
        self._k_inverse, self._v_inverse = 1 / spec.k_scale, 1 / spec.v_scale
        self._keys = tuple(self._slots(each) for each in cache.keys)
        self._values = tuple(self._slots(each) for each in cache.values)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """`slots` are int64 `[tokens]`."""
        if self._is_rounded:
            k, v = self._rounded(k, self._k_inverse), self._rounded(v, self._v_inverse)
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)

    def _slots(self, pages: Tensor) -> Tensor:
        """`[slots, heads, dim]`; 8-bit floats as bytes, which every kernel of torch can move."""
        slots = pages.view(-1, *pages.shape[2:])  # which must not become a copy
        return slots.view(torch.uint8) if self._is_rounded else slots

    def _rounded(self, rows: Tensor, inverse: float) -> Tensor:
        scaled = rows if inverse == 1.0 else rows * inverse
        return scaled.clamp(-MOST_FP8, MOST_FP8).to(self._dtype).view(torch.uint8)


class Turner:
    """Rotates q and k with one kernel a layer; its table is made once a step, in layer 0.

    In layer 0 always: a graph must make its own, even of tensors that were there before.
    """

    def __init__(self, library: Library, max_tokens: int) -> None:
        self._library = library
        self._rows = library.on_device(max_tokens, torch.int32)
        torch.arange(max_tokens, out=self._rows)
        self._cos_sin = self._rows.new_empty(0, dtype=torch.float32)
        self._turn: Turn | None = None  # of which the table is

    def turn(self, layer: int, q: Tensor, k: Tensor, turn: Turn) -> None:
        """In place; the layers of a step come one after the other, 0 first."""
        if layer == 0 or turn is not self._turn:
            self._turn = turn
            self._cos_sin = torch.cat((turn.cos, turn.sin), dim=-1).float()
        self._library.turn(q, k, self._cos_sin, self._rows[: len(q)])
