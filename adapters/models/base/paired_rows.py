"""Families whose RoPE turns neighbouring dimensions of a head: GLM, Cohere, ERNIE.

The engine turns pairs made of the two halves of the rotated dimensions. So the rows of q and k are
put into that order when they are read: scores of q and k are the same in any order that both have.

    checkpoint    0 1 | 2 3 | 4 5 | …     pairs of neighbours
    engine        0 2 4 … | 1 3 5 …       a pair has one row of each half

LoRA adapters have factors in the checkpoint's order, and are refused for these linears by name.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.worker.ports import (
    DeferredWeight,
    LinearWeight,
    Lookup,
    TensorSlice,
    Weight,
    WeightSource,
)

LINEARS = ("self_attn.q_proj", "self_attn.k_proj")


class PairedRows:
    """A `WeightSource` with the rows of q and k in the engine's order."""

    def __init__(self, weights: WeightSource, head_dim: int, rotated: int) -> None:
        """The first `rotated` dimensions of each head are turned."""
        self._weights = weights
        pairs = torch.arange(rotated).view(-1, 2).t().flatten()
        self._order = torch.cat((pairs, torch.arange(rotated, head_dim)))

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, part: TensorSlice) -> Tensor:
        tensor = self._weights.tensor(part)
        return self._rows(tensor) if _is_turned(part) else tensor

    def weight(self, part: TensorSlice) -> LinearWeight:
        weight = self._weights.weight(part)
        if not _is_turned(part):
            return weight
        if not isinstance(weight, DeferredWeight):
            return self._ordered(weight)
        read = weight.read
        return replace(weight, read=lambda part: self._ordered(read(part)))

    def lookup(self, part: TensorSlice) -> Lookup:
        return self._weights.lookup(part)

    def skip(self, name: str) -> None:
        self._weights.skip(name)

    def _ordered(self, weight: Weight) -> Weight:
        return self._rows(weight) if isinstance(weight, Tensor) else weight.map(self._rows)

    def _rows(self, tensor: Tensor) -> Tensor:
        """The rows of whole heads in order, always in a tensor of its own: the linear of a weight
        that is not the checkpoint's has no LoRA."""
        if not any(tensor.stride()):
            return tensor.expand(tensor.shape)  # it has no contents
        heads = tensor.view(-1, len(self._order), *tensor.shape[1:])
        return heads[:, self._order].flatten(0, 1)


def _is_turned(part: TensorSlice) -> bool:
    """Whether it is the weight or bias of q or k."""
    return part.name.rpartition(".")[0].endswith(LINEARS)
