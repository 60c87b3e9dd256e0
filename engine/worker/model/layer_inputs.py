"""Embeddings per layer (Gemma 3n and 4): each layer adds something that depends on the token id.

A second embedding has a row of `layers * width` for each id. Together with a projection of the
first embedding it gives every layer an input `[tokens, width]` of its own. The first stage computes
them for all layers, and each stage sends those of later layers on, behind the hidden states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.worker.ports import Linear, Lookup, Norm


class Padding(NamedTuple):
    """The tokens `image_id` stand for images: layers get the row of `pad_id` for them."""

    image_id: int
    pad_id: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Computes the inputs of all layers, once per step."""

    rows: Lookup  # [vocab, layers * width]
    scale: float  # rows are multiplied by it
    projection: Linear  # hidden to layers * width
    norm: Norm  # over width
    width: int
    result_scale: float
    padding: Padding | None = None

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """`[tokens, layers, width]` from token ids and their embeddings `[tokens, hidden]`."""
        if self.padding is not None:
            ids = ids.masked_fill(ids == self.padding.image_id, self.padding.pad_id)
        own = self.rows(ids) * self.scale
        projected = self.norm(self.projection(hidden).view(-1, self.width)).view(own.shape)
        return ((projected + own) * self.result_scale).view(len(ids), -1, self.width)


@dataclass(frozen=True, slots=True)
class StageInputs:
    """The inputs of the layers of one stage, and of later ones. `source` is that of the first."""

    hidden_size: int
    width: int
    num_layers: int  # layers in this stage
    source: LayerInputs | None = None

    def split(self, hidden: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states `[tokens, hidden]`, and inputs `[tokens, layers, width]` from this stage's
        layers on. Later stages have received both in one tensor; the first needs `ids`."""
        if self.source is None:
            return self._received(hidden)
        assert ids is not None, "the first stage has token ids"
        return hidden, self.source(ids, hidden)

    def _received(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        size = self.hidden_size
        inputs = wide[:, size:].contiguous().view(len(wide), -1, self.width)
        return wide[:, :size].contiguous(), inputs

    def joined(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """What the next stage receives; `hidden` itself on the last stage."""
        later = inputs[:, self.num_layers :]
        if not later.shape[1]:
            return hidden
        return torch.cat((hidden, later.reshape(len(hidden), -1).to(hidden.dtype)), dim=1)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Adds `norm(projection(act(gate(hidden)) * input))` to the residual stream in place."""

    layer: int  # the index in the stage
    gate: Linear
    activation: Callable[[Tensor, Tensor], Tensor]
    projection: Linear
    norm: Norm

    def __call__(self, hidden: Tensor, inputs: Tensor, rows: Tensor | None) -> Tensor:
        """`hidden` of `rows`; `inputs` are those of all rows, from the stage's first layer on."""
        own = inputs[:, self.layer]
        own = own if rows is None else own.index_select(0, rows)
        return self.norm(self.projection(self.activation(self.gate(hidden), own)), hidden)
