"""A rank's shard of the linears around attention and MLP, of the embedding and of the head."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.worker.model.layers import Added, Embedding
from engine.worker.model.shard import RankPart, Shard
from engine.worker.ports import Linear, Operators, WeightSource


@dataclass(frozen=True, slots=True)
class Projections:
    """Builds linears from weights stored as `[out, in]`. Names are without `.weight`."""

    weights: WeightSource
    shard: Shard
    operators: Operators

    def fan_out(self, outputs: Mapping[str, RankPart], *, has_bias: bool) -> Linear:
        """One linear that concatenates several which read the hidden states, such as q, k, v."""
        hidden = self.shard.shape.hidden_size
        weights = [
            self.weights.take_matrix(f"{name}.weight", part.size, hidden, rows=part.run)
            for name, part in outputs.items()
        ]
        biases = [
            self.weights.take(f"{name}.bias", part.size, rows=part.run)
            for name, part in outputs.items()
            if has_bias
        ]
        return self.operators.linear(weights, torch.cat(biases) if biases else None)

    def fan_in(self, name: str, inputs: RankPart, *, has_bias: bool) -> Linear:
        """A linear back to the hidden states, summed over the ranks; rank 0 adds the bias."""
        hidden = self.shard.shape.hidden_size
        weight = self.weights.take_matrix(f"{name}.weight", hidden, inputs.size, columns=inputs.run)
        bias = self.weights.take(f"{name}.bias", hidden) if has_bias else None
        return self.summed(self.operators.linear([weight], bias if self.shard.rank == 0 else None))

    def summed(self, part: Linear) -> Linear:
        """`part`, which has this rank's input columns, with its output summed over the ranks."""
        add_up = self.shard.add_up
        return part if add_up is None else Added(part, add_up)


def embedding_and_head(
    projections: Projections, name: str, *, is_tied: bool
) -> tuple[Embedding | None, Linear | None]:
    """The embedding of the first stage and the head of the last one; None on other stages.

    `name` is the embedding's tensor, which a tied head shares even if it is stored again.
    """
    weights, shard = projections.weights, projections.shard
    part, hidden = shard.vocabulary, shard.shape.hidden_size
    embedding = head = None
    if shard.is_first:
        tokens = weights.take(name, part.size, hidden, rows=part.run)
        embedding = Embedding(tokens, part, shard.add_up)
    if shard.is_last:
        if is_tied and weights.has("lm_head.weight"):
            weights.take("lm_head.weight", part.size, hidden, rows=part.run)
        source = name if is_tied else "lm_head.weight"
        rows = weights.take_matrix(source, part.size, hidden, rows=part.run)
        head = projections.operators.linear([rows], None)
    return embedding, head
