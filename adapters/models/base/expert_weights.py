"""The weights of one expert, of which a checkpoint has one tensor for each linear."""

from typing import NamedTuple

import torch

from adapters.models.base.projections import Projections
from engine.worker.ports import ExpertWeights, TensorSlice


class ExpertNames(NamedTuple):
    """How a family names the tensors of a mixture, within a layer."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    has_biases: bool = False  # whether the router and all linears have biases
    shared: str = "shared_expert"  # the name of the experts that all tokens use
    gates_shared: bool = True  # by a score of each token


def expert_weights(projections: Projections, at: str, names: ExpertNames) -> ExpertWeights:
    """This rank's columns of the expert named `at`."""
    weights, inner = projections.weights, projections.shard.inner
    hidden = projections.shard.shape.hidden_size
    gate, up = (
        weights.weight(TensorSlice(f"{at}.{name}.weight", (inner.size, hidden), rows=inner.run))
        for name in (names.gate, names.up)
    )
    down = weights.weight(
        TensorSlice(f"{at}.{names.down}.weight", (hidden, inner.size), columns=inner.run)
    )
    if not names.has_biases:
        return ExpertWeights(gate, up, down)
    up_biases = [
        weights.tensor(TensorSlice(f"{at}.{name}.bias", (inner.size,), rows=inner.run))
        for name in (names.gate, names.up)
    ]
    down_bias = weights.tensor(TensorSlice(f"{at}.{names.down}.bias", (hidden,)))
    is_first = projections.shard.rank == 0  # the ranks' results are summed
    return ExpertWeights(gate, up, down, torch.cat(up_biases), down_bias if is_first else None)
