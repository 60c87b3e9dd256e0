"""The mixture of experts that layers of Gemma 4 26B-A4B have beside their MLP."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.mixtures.experts import ExpertNames, expert_weights
from engine.errors import StartupError
from engine.worker.model.experts import MlpBesideExperts
from engine.worker.model.layers import DecoderLayer
from engine.worker.ports import ExpertShape, ModelShape, Norm, Routing, TensorSlice


@dataclass(frozen=True, slots=True)
class Gemma4Experts:
    """Sizes of the experts, and how they are chosen."""

    count: int
    inner_size: int
    routing: Routing

    @classmethod
    def of(cls, fields: Fields) -> Self | None:
        """None if the layers have no experts."""
        if not fields.flag("enable_moe_block", False):
            return None
        count, top_k = fields.integer("num_experts"), fields.integer("top_k_experts")
        if top_k > count:
            raise StartupError(
                f"{fields.where}: top_k_experts={top_k} is more than the {count} experts"
            )
        routing = Routing(top_k, renormalizes=True)
        return cls(count, fields.integer("moe_intermediate_size"), routing)

    def sized(self, shape: ModelShape) -> ModelShape:
        """The shape with the experts beside the MLP."""
        hidden = shape.hidden_size
        own = 3 * hidden * self.inner_size
        return replace(
            shape,
            layer_parameters=shape.layer_parameters + self.count * (own + hidden),
            experts=ExpertShape(self.count, self.routing.top_k, own),
        )

    def beside(
        self,
        block: DecoderLayer,
        projections: Projections,
        at: str,
        norm: Callable[[str], Norm],
        eps: float,
        activation: Callable[[Tensor], Tensor],
    ) -> DecoderLayer:
        """The layer named `at` with these experts; `norm` makes the norm of a name."""
        weights, operators = projections.weights, projections.operators
        hidden, shard = projections.shard.shape.hidden_size, projections.shard
        own = replace(
            projections,
            shard=replace(shard, shape=replace(shard.shape, inner_size=self.inner_size)),
        )
        scale = weights.tensor(TensorSlice(f"{at}.router.scale", (hidden,)))
        scales = weights.tensor(TensorSlice(f"{at}.router.per_expert_scale", (self.count,)))
        router = weights.tensor(TensorSlice(f"{at}.router.proj.weight", (self.count, hidden)))
        names = (f"{at}.experts.{each}" for each in range(self.count))
        experts = [expert_weights(own, name, ExpertNames()) for name in names]
        routing = replace(self.routing, scales=operators.constant(scales.float().contiguous()))
        assert block.mlp_norm is not None, "Gemma has norms before and behind MLPs"
        mixture = MlpBesideExperts(
            mlp_norm=block.mlp_norm,
            mlp=block.mlp,
            mlp_post_norm=norm("post_feedforward_layernorm_1"),
            router_norm=operators.rms_norm(scale * hidden**-0.5, eps),
            router=operators.linear([router], None),
            experts_norm=norm("pre_feedforward_layernorm_2"),
            experts=operators.experts(experts, routing, activation),
            experts_post_norm=norm("post_feedforward_layernorm_2"),
            all_reduce=shard.all_reduce,
        )
        return replace(block, mlp_norm=None, mlp=mixture)
