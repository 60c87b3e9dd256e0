"""Embeddings per layer (Gemma 3n and 4): each layer adds something that depends on the token id.

A second embedding has a row of `layers * width` for each id. Together with a projection of the
first embedding it gives every layer an input `[tokens, width]` of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from engine.worker.ports import Linear, Norm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Computes the inputs of all layers, once per step."""

    rows: Tensor  # [vocab, layers * width]
    scale: float  # of the rows
    projection: Linear  # hidden to layers * width
    norm: Norm  # over width
    width: int
    result_scale: float

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """`[tokens, layers, width]` from token ids and their embeddings `[tokens, hidden]`."""
        own = F.embedding(ids, self.rows) * self.scale
        projected = self.norm(self.projection(hidden).view(-1, self.width)).view(own.shape)
        return ((projected + own) * self.result_scale).view(len(ids), -1, self.width)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Adds `norm(projection(act(gate(hidden)) * input))` to the residual stream in place."""

    layer: int
    gate: Linear
    activation: Callable[[Tensor, Tensor], Tensor]
    projection: Linear
    norm: Norm

    def __call__(self, hidden: Tensor, inputs: Tensor, rows: Tensor | None) -> Tensor:
        """`hidden` of `rows`; `inputs` are those of all layers and rows."""
        own = inputs[:, self.layer]
        own = own if rows is None else own.index_select(0, rows)
        return self.norm(self.projection(self.activation(self.gate(hidden), own)), hidden)
