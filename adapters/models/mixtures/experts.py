"""The base of Llama-like decoders whose MLPs are mixtures of experts.

Checkpoints have one tensor for each linear of each expert:
`model.layers.N.<block>.experts.E.<linear>.weight`.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rotary import RotaryFamily
from engine.errors import StartupError
from engine.worker.model.experts import SharedExpert, SparseMlp
from engine.worker.model.layers import FeedForward, Mlp
from engine.worker.ports import (
    ExpertShape,
    ExpertWeights,
    ModelShape,
    Operators,
    Routing,
    TensorSlice,
)


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


class ExpertFamily(RotaryFamily):
    """A `RotaryFamily` with a mixture of experts in every layer."""

    names = ExpertNames()
    _shared_size = 0

    @abstractmethod
    def routing(self, fields: Fields) -> Routing: ...

    def num_experts(self, fields: Fields) -> int:
        """The number under either of the two names that releases of transformers write."""
        is_new = fields.get("num_experts") is None and fields.get("num_local_experts") is not None
        return fields.integer("num_local_experts" if is_new else "num_experts")

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        """The shape with the experts in place of an MLP of width `inner_size`."""
        shape = super().sized(fields, shape)
        count, self._routing = self.num_experts(fields), self.routing(fields)
        if self._routing.top_k > count:
            raise StartupError(
                f"{fields.where}: num_experts_per_tok={self._routing.top_k} is more than the "
                f"{count} experts"
            )
        hidden = shape.hidden_size
        own = 3 * hidden * shape.inner_size
        self._shared_size = self.shared_size(fields)
        shared = 3 * hidden * self._shared_size + (hidden if self._shared_size else 0)
        return replace(
            shape,
            layer_parameters=shape.layer_parameters + (count - 1) * own + count * hidden + shared,
            experts=ExpertShape(count, self._routing.top_k, own),
        )

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        shape, operators, names = projections.shard.shape, projections.operators, self.names
        assert shape.experts is not None, "`sized` has filled it in"
        at = f"{at.rpartition('.')[0]}.{names.block}"
        count, hidden = shape.experts.num_experts, shape.hidden_size
        weights = projections.weights
        router = weights.tensor(TensorSlice(f"{at}.{names.router}.weight", (count, hidden)))
        bias = None
        if names.has_biases:
            bias = weights.tensor(TensorSlice(f"{at}.{names.router}.bias", (count,)))
        experts = [
            expert_weights(projections, f"{at}.experts.{each}", names) for each in range(count)
        ]
        routing = self.layer_routing(projections, at)
        return SparseMlp(
            router=operators.linear([router], bias),
            experts=operators.experts(experts, routing, self.activation(operators)),
            all_reduce=projections.shard.all_reduce,
            shared=self._shared(projections, at) if self._shared_size else None,
        )

    def layer_routing(self, projections: Projections, at: str) -> Routing:
        """The routing of the layer whose mixture is named `at`."""
        return self._routing

    def shared_size(self, fields: Fields) -> int:
        """The width of the expert that all tokens use; 0 if there is none."""
        return 0

    def _shared(self, projections: Projections, at: str) -> SharedExpert:
        weights, operators = projections.weights, projections.operators
        hidden, part = (
            projections.shard.shape.hidden_size,
            projections.shard.even(self._shared_size),
        )
        names = self.names
        at, gate = f"{at}.{names.shared}", f"{at}.{names.shared}_gate.weight"
        up = [
            weights.weight(TensorSlice(f"{at}.{name}.weight", (part.size, hidden), rows=part.run))
            for name in (names.gate, names.up)
        ]
        down = weights.weight(
            TensorSlice(f"{at}.{names.down}.weight", (hidden, part.size), columns=part.run)
        )
        return SharedExpert(
            up=operators.linear(up, None),
            down=operators.linear([down], None),
            activation=self.activation(operators),
            gate_rows_=operators.gate_rows_,
            gate=operators.linear([weights.tensor(TensorSlice(gate, (1, hidden)))], None)
            if names.gates_shared
            else None,
        )

    def activation(self, operators: Operators) -> Callable[[Tensor], Tensor]:
        """The gate of an expert's MLP."""
        return operators.activation(self._settings.activation, is_gated=True)


class DenseFirst(ExpertFamily):
    """A family with experts whose first layers have an MLP; `routing` fills in its numbers."""

    _num_dense = 0
    _dense_size = 0
    # Added when experts are chosen; a name within a layer
    bias_name = "gate.e_score_correction_bias"

    def layer_routing(self, projections: Projections, at: str) -> Routing:
        """The routing with the factors and, if the checkpoint has one, the bias of the layer."""
        assert self._routing.scales is not None, "`routing` has filled it in"
        name = f"{at}.{self.bias_name}"
        constant, bias = projections.operators.constant, None
        if projections.weights.has(name):  # DeepSeek V2 has none
            part = TensorSlice(name, tuple(self._routing.scales.shape))
            bias = constant(projections.weights.tensor(part).float().contiguous())
        return replace(self._routing, scales=constant(self._routing.scales), bias=bias)

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        if int(at.split(".")[-2]) >= self._num_dense:
            return super()._mlp(projections, at)
        inner = projections.shard.even(self._dense_size)
        names = self.names
        parts = [(f"{at}.{names.gate}", inner), (f"{at}.{names.up}", inner)]
        return Mlp(
            up=projections.from_hidden(parts, has_bias=False),
            down=projections.to_hidden(f"{at}.{names.down}", inner, has_bias=False),
            activation=self.activation(projections.operators),
        )
