"""New keys and values on their way into the paged cache: turned, rounded, written by slot.

FlashInfer's append is not used: it wants two more tables per step, rounds nothing to 8 bits, and
reads out of bounds for rows that belong to no request. Slots are in the layout anyway, and rows of
padding have one, too.
"""

import torch
from torch import Tensor

from adapters.attention.flashinfer import fp8
from adapters.attention.flashinfer.ports import Library
from engine.worker.model.kv_tensors import KVTensors, as_bytes
from engine.worker.ports import AttentionSpec, RotaryAngles


class RowWriter:
    """Writes rows of k or v `[tokens, heads, dim]` into slots, in the dtype of the cache."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors) -> None:
        self._scales = spec.k_scale, spec.v_scale
        self._keys = tuple(_slots(each) for each in cache.keys)
        self._values = tuple(_slots(each) for each in cache.values)
        self._is_rounded = cache.keys[0].dtype == fp8.FP8

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """`slots` are int64 `[tokens]`."""
        if self._is_rounded:
            k, v = (
                as_bytes(fp8.rounded(rows, scale))
                for rows, scale in zip((k, v), self._scales, strict=True)
            )
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)


def _slots(pages: Tensor) -> Tensor:
    """`[slots, heads, dim]` over the same memory; raises if the slots do not lie in a row."""
    return as_bytes(pages.view(-1, *pages.shape[2:]))


class ApplyRope:
    """Rotates q and k with one kernel a layer; its table is made once a step, in layer 0.

    In layer 0 always: a graph must make its own, even of tensors that were there before.
    """

    def __init__(self, library: Library, max_tokens: int) -> None:
        self._library = library
        self._rows = library.on_device(max_tokens, torch.int32)
        torch.arange(max_tokens, out=self._rows)
        self._cos_sin = self._rows.new_empty(0, dtype=torch.float32)
        self._turn: RotaryAngles | None = None  # of which the table is

    def turn(self, layer: int, q: Tensor, k: Tensor, turn: RotaryAngles) -> None:
        """In place; the layers of a step come one after the other, 0 first."""
        if layer == 0 or turn is not self._turn:
            self._turn = turn
            self._cos_sin = torch.cat((turn.cos, turn.sin), dim=-1).float()
        self._library.turn(q, k, self._cos_sin, self._rows[: len(q)])
