"""A rank's shard of the linears around attention and MLP, of the embedding and of the head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from engine.worker.model.layers import Embedding, RowParallelLinear
from engine.worker.ports import (
    HeadTiles,
    Linear,
    Operators,
    RankPart,
    Shard,
    TensorSlice,
    WeightSource,
)


class Fused(NamedTuple):
    """A tensor that the checkpoint stores instead of several, stacked along the outputs; `order`
    numbers the parts in the order in which a linear has them, by default the same."""

    name: str
    parts: tuple[RankPart, ...]  # the part of each tensor in it
    order: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def runs(self) -> list[range]:
        """This rank's rows of each part, counted in the whole tensor."""
        starts = accumulate((part.size for part in self.parts), initial=0)
        found = [
            range(start + part.run.start, start + part.run.stop)
            for start, part in zip(starts, self.parts, strict=False)
        ]
        return [found[at] for at in self.order or range(len(found))]


Parts: TypeAlias = Sequence[tuple[str, RankPart]]  # a tensor may occur twice


@dataclass(frozen=True, slots=True)
class Projections:
    """Builds linears from weights stored as `[out, in]`. Names are without `.weight`; those of
    layers begin with `root`."""

    weights: WeightSource
    shard: Shard
    operators: Operators
    root: str = "model"

    def from_hidden(
        self, outputs: Mapping[str, RankPart] | Parts | Fused, *, has_bias: bool
    ) -> Linear:
        """One fused linear of several that read the hidden states, stacked along the outputs."""
        hidden = self.shard.shape.hidden_size
        if isinstance(outputs, Fused):
            slices = [(outputs.name, outputs.size, run) for run in outputs.runs]
        else:
            pairs = outputs.items() if isinstance(outputs, Mapping) else outputs
            slices = [(name, part.size, part.run) for name, part in pairs]
        weights = [
            self.weights.weight(TensorSlice(f"{name}.weight", (size, hidden), rows=run))
            for name, size, run in slices
        ]
        biases = [
            self.weights.tensor(TensorSlice(f"{name}.bias", (size,), rows=run))
            for name, size, run in slices
            if has_bias
        ]
        return self.operators.linear(weights, torch.cat(biases) if biases else None)

    def to_hidden(
        self, name: str, inputs: RankPart, *, has_bias: bool, tiles: HeadTiles | None = None
    ) -> Linear:
        """A linear back to the hidden states, summed over the ranks; rank 0 adds the bias."""
        hidden = self.shard.shape.hidden_size
        weight = self.weights.weight(
            TensorSlice(f"{name}.weight", (hidden, inputs.size), columns=inputs.run, tiles=tiles)
        )
        bias = self.weights.tensor(TensorSlice(f"{name}.bias", (hidden,))) if has_bias else None
        return self.summed(self.operators.linear([weight], bias if self.shard.rank == 0 else None))

    def summed(self, part: Linear) -> Linear:
        """The sum over all ranks of what each rank's `part` computes from its columns."""
        all_reduce = self.shard.all_reduce
        return part if all_reduce is None else RowParallelLinear(part, all_reduce)


def embedding_and_head(
    projections: Projections, name: str, *, is_tied: bool
) -> tuple[Embedding | None, Linear | None]:
    """The embedding on the first stage and the head on the last one; None elsewhere, and no head
    without logits.

    `name` is the embedding's tensor. A tied head uses it too, even if the file stores a copy.
    """
    weights, shard = projections.weights, projections.shard
    part, hidden = shard.vocabulary, shard.shape.hidden_size
    embedding = head = None
    if shard.is_first:
        tokens = weights.lookup(TensorSlice(name, (part.size, hidden), rows=part.run))
        embedding = Embedding(tokens, part, shard.all_reduce)
    if not shard.has_logits:
        if weights.has("lm_head.weight"):
            weights.skip("lm_head.weight")
    elif shard.is_last:
        own = TensorSlice("lm_head.weight", (part.size, hidden), rows=part.run)
        if is_tied and weights.has(own.name):
            weights.tensor(own)
        source = TensorSlice(name, (part.size, hidden), rows=part.run) if is_tied else own
        head = projections.operators.linear([weights.weight(source)], None)
    return embedding, head
