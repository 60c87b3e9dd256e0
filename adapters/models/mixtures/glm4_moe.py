"""GLM-4.5 and 4.6: experts chosen by sigmoids and a bias, one that all tokens use, and MLPs without
experts in the first layers. Its layer for multi-token prediction is not loaded."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from adapters.models.base.expert_weights import ExpertNames
from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.traits import FamilyTraits
from adapters.models.mixtures.experts import ExpertFamily
from engine.worker.model.layers import FeedForward, Mlp
from engine.worker.ports import ModelShape, Routing, TensorSlice


class Glm4Moe(ExpertFamily):
    """`Glm4MoeForCausalLM`; groups of experts (DeepSeek V3) are not supported."""

    names = ExpertNames(shared="shared_experts", gates_shared=False)
    renormalizes = True  # unless config.json says otherwise

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self.ignored_weights = (
            *self.ignored_weights,
            f"model.layers.{self.shape.num_layers}.*",  # for multi-token prediction
        )

    def traits(self, fields: Fields) -> FamilyTraits:
        qk_norm = "head" if fields.flag("use_qk_norm", False) else ""
        return FamilyTraits(qkv_bias=fields.flag("attention_bias", False), qk_norm=qk_norm)

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions, share=0.5)
        return LayerRopes.same(source, shape.num_layers)

    def inner_size(self, fields: Fields) -> int:
        return fields.integer("moe_intermediate_size")

    def num_experts(self, fields: Fields) -> int:
        return fields.integer("n_routed_experts")

    def shared_size(self, fields: Fields) -> int:
        count = fields.count("n_shared_experts", 1)
        return count * fields.integer("moe_intermediate_size")

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("n_group", 1)
        self._num_dense = fields.count("first_k_dense_replace", 1)
        self._dense_size = fields.integer("intermediate_size")
        factor = fields.number("routed_scaling_factor", 1.0)
        return Routing(
            fields.integer("num_experts_per_tok", 8),
            renormalizes=fields.flag("norm_topk_prob", self.renormalizes),
            scales=torch.full((self.num_experts(fields),), factor),
        )

    def layer_routing(self, projections: Projections, at: str) -> Routing:
        assert self._routing.scales is not None, "`routing` has filled it in"
        name = f"{at}.{self.names.router}.e_score_correction_bias"
        constant, bias = projections.operators.constant, None
        if projections.weights.has(name):  # DeepSeek V2 has none
            part = TensorSlice(name, tuple(self._routing.scales.shape))
            bias = constant(projections.weights.tensor(part).float().contiguous())
        return replace(self._routing, scales=constant(self._routing.scales), bias=bias)

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        if int(at.split(".")[-2]) >= self._num_dense:
            return super()._mlp(projections, at)
        inner = projections.shard.even(self._dense_size)
        parts = {f"{at}.gate_proj": inner, f"{at}.up_proj": inner}
        return Mlp(
            up=projections.from_hidden(parts, has_bias=False),
            down=projections.to_hidden(f"{at}.down_proj", inner, has_bias=False),
            activation=self.activation(projections.operators),
        )
