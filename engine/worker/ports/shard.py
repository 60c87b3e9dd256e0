"""Which part of a model one worker holds: the layers of its stage, and its rank's share of each.

Within a stage the split is Megatron's (Shoeybi et al., 2019): qkv and the MLP's up projection by
rows, so that each rank has whole heads; the projections after them by columns, with an all-reduce
of the ranks' results.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Self

from torch import Tensor

from engine.errors import StartupError
from engine.worker.ports.shapes import ModelShape
from engine.worker_settings import Placement

AllReduce = Callable[[Tensor], None]  # in place, over the ranks of a stage


class RankPart(NamedTuple):
    """The range `run` of a dimension with `size` rows or columns."""

    size: int
    run: range

    @classmethod
    def whole(cls, size: int) -> "RankPart":
        return cls(size, range(size))

    def times(self, width: int) -> "RankPart":
        """The same part in units of `width` rows, such as the rows of a head."""
        run = range(self.run.start * width, self.run.stop * width)
        return RankPart(self.size * width, run)


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one worker. `all_reduce` is None if one rank holds whole layers.

    Without `has_logits` the model computes no logits, and its head is not loaded.
    """

    shape: ModelShape
    span: range  # the layers that it holds
    rank: int = 0
    num_ranks: int = 1
    all_reduce: AllReduce | None = None
    has_logits: bool = True

    @classmethod
    def whole(cls, shape: ModelShape) -> Self:
        """All of the model."""
        return cls(shape, range(shape.num_layers))

    @classmethod
    def of(cls, shape: ModelShape, placement: Placement, all_reduce: AllReduce | None) -> Self:
        """The share of a placement; raises `StartupError` if the model cannot be split that way."""
        span = layer_spans(shape, placement.num_stages)[placement.stage]
        shard = cls(shape, span, placement.rank, placement.num_ranks, all_reduce)
        shard._check()
        return shard

    @property
    def is_first(self) -> bool:
        return self.span.start == 0

    @property
    def is_last(self) -> bool:
        return self.span.stop == self.shape.num_layers

    @property
    def received_width(self) -> int:
        """Elements of each token that the previous stage sends."""
        return self._width(self.span.start)

    @property
    def sent_width(self) -> int:
        """Elements of each token that the next stage receives."""
        return self._width(self.span.stop)

    def _width(self, layer: int) -> int:
        """The width of the hidden states before a layer, and of the inputs of the layers from there
        on."""
        rest = self.shape.num_layers - layer
        return self.shape.hidden_size + rest * self.shape.layer_input_width

    @property
    def heads(self) -> RankPart:
        return self._even(self.shape.num_heads)

    @property
    def kv_heads(self) -> RankPart:
        """This rank's KV heads; if there are fewer than ranks, several ranks hold the same."""
        count = self.shape.num_kv_heads
        if count >= self.num_ranks:
            return self._even(count)
        first = self.rank * count // self.num_ranks
        return RankPart(count, range(first, first + 1))

    @property
    def inner(self) -> RankPart:
        """This rank's part of the MLP's width."""
        return self._even(self.shape.inner_size)

    @property
    def vocabulary(self) -> RankPart:
        """This rank's ids in embedding and head; parts may differ by one id."""
        return self._even(self.shape.vocab_size)

    @property
    def local_shape(self) -> ModelShape:
        """The shape of this worker's KV cache and attention: its own layers and heads."""
        return replace(
            self.shape,
            num_layers=len(self.span),
            num_heads=len(self.heads.run),
            num_kv_heads=len(self.kv_heads.run),
            attention=tuple(
                replace(options, num_kv_heads=options.num_kv_heads // self.num_ranks)
                if options.num_kv_heads
                else options
                for options in self.shape.attention[self.span.start : self.span.stop]
            ),
            recurrent=tuple(
                shape and shape.of_rank(self.num_ranks)
                for shape in self.shape.recurrent[self.span.start : self.span.stop]
            ),
        )

    def number_of(self, layer: int) -> int:
        """How many layers of the stage are before this one and of its kind: with attention, or
        recurrent."""
        kinds = [each is None for each in self.shape.recurrent] or [True] * self.shape.num_layers
        return kinds[self.span.start : layer].count(kinds[layer])

    def even(self, size: int) -> RankPart:
        """This rank's part of a dimension that is divided evenly."""
        return self._even(size)

    def _even(self, size: int) -> RankPart:
        start, stop = (size * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return RankPart(size, range(start, stop))

    def _check(self) -> None:
        ranks, shape = self.num_ranks, self.shape
        uneven = f"cannot be divided evenly among {ranks} ranks (--tensor-ranks)"
        for what, size in (("attention heads", shape.num_heads), ("MLP columns", shape.inner_size)):
            if size % ranks:
                raise StartupError(f"{size} {what} {uneven}")
        for layer in shape.recurrent_layers:
            size, what = layer.parts
            if size % ranks:
                raise StartupError(f"{size} {what} of recurrent layers {uneven}")
        count, own = shape.num_kv_heads, {each.num_kv_heads for each in shape.attention}
        odd = [each for each in own if each is not None and each % ranks]
        if odd or (count % ranks and ranks % count):
            raise StartupError(f"{(*odd, count)[0]} key-value heads {uneven}")


def layer_spans(shape: ModelShape, num_stages: int) -> list[range]:
    """The layers of each stage, so that the busiest stage reads as few weights as possible.

    Counted are the weights read per iteration: those of the layers, and the head's on the last
    stage. The embedding is a lookup and is not counted. The last stage holds all layers that read
    the KV of others, and these others. Raises `StartupError` if there are more stages than layers
    that can be divided.
    """
    layers = shape.num_layers
    if num_stages == 1:
        return [range(layers)]
    before, together = num_stages - 1, _first_shared(shape)
    if before > min(layers - 1, together):
        shared = f", and layers from {together} on share KV" if together < layers else ""
        raise StartupError(
            f"{layers} layers cannot be divided among {num_stages} stages "
            f"(--pipeline-stages){shared}"
        )
    head = shape.vocab_size * shape.hidden_size / shape.layer_parameters  # in layers

    def busiest(last: int) -> float:
        return max(last + head, -(-(layers - last) // before))

    rest = layers - min(range(max(1, layers - together), layers - before + 1), key=busiest)
    bounds = [*(rest * stage // before for stage in range(num_stages)), layers]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _first_shared(shape: ModelShape) -> int:
    """The first layer whose KV a later one reads; the number of layers if there is none."""
    found = [options.kv_layer for options in shape.attention if options.kv_layer is not None]
    return min(found, default=shape.num_layers)
