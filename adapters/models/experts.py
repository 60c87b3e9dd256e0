"""The base of Llama-like decoders whose MLPs are mixtures of experts.

Checkpoints have one tensor for each linear of each expert:
`model.layers.N.<block>.experts.E.<linear>.weight`.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from adapters.models.fields import Fields
from adapters.models.projections import Projections
from adapters.models.rotary import RotaryFamily
from engine.errors import StartupError
from engine.worker.model.experts import SparseMlp
from engine.worker.ports import ExpertShape, ExpertWeights, ModelShape, Routing, TensorSlice


class ExpertNames(NamedTuple):
    """How a family names the tensors of a mixture, within a layer."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class ExpertFamily(RotaryFamily):
    """A `RotaryFamily` with a mixture of experts in every layer."""

    names = ExpertNames()

    @abstractmethod
    def routing(self, fields: Fields) -> Routing: ...

    def num_experts(self, fields: Fields) -> int:
        """From either of the two names that releases of transformers write."""
        is_new = fields.get("num_experts") is None and fields.get("num_local_experts") is not None
        return fields.integer("num_local_experts" if is_new else "num_experts")

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        """With the experts in place of an MLP of width `inner_size`."""
        count, self._routing = self.num_experts(fields), self.routing(fields)
        if self._routing.top_k > count:
            raise StartupError(
                f"{fields.where}: num_experts_per_tok={self._routing.top_k} is more than the "
                f"{count} experts"
            )
        hidden = shape.hidden_size
        own = 3 * hidden * shape.inner_size
        return replace(
            shape,
            layer_parameters=shape.layer_parameters + (count - 1) * own + count * hidden,
            experts=ExpertShape(count, self._routing.top_k, own),
        )

    def _mlp(self, projections: Projections, at: str) -> SparseMlp:
        shape, operators = projections.shard.shape, projections.operators
        assert shape.experts is not None, "`sized` has filled it in"
        at = f"{at.rpartition('.')[0]}.{self.names.block}"
        count, hidden = shape.experts.num_experts, shape.hidden_size
        router = projections.weights.tensor(
            TensorSlice(f"{at}.{self.names.router}.weight", (count, hidden))
        )
        experts = [self._expert(projections, f"{at}.experts.{each}") for each in range(count)]
        return SparseMlp(
            router=operators.linear([router], None),
            experts=operators.experts(experts, self._routing, self._activation(projections)),
            all_reduce=projections.shard.all_reduce,
        )

    def _activation(self, projections: Projections) -> Callable[[Tensor], Tensor]:
        return projections.operators.activation(self._settings.activation, is_gated=True)

    def _expert(self, projections: Projections, at: str) -> ExpertWeights:
        weights, inner = projections.weights, projections.shard.inner
        hidden = projections.shard.shape.hidden_size
        gate, up = (
            weights.weight(TensorSlice(f"{at}.{name}.weight", (inner.size, hidden), rows=inner.run))
            for name in (self.names.gate, self.names.up)
        )
        down = weights.weight(
            TensorSlice(f"{at}.{self.names.down}.weight", (hidden, inner.size), columns=inner.run)
        )
        return ExpertWeights(gate, up, down)
