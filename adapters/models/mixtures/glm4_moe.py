"""GLM-4.5 and 4.6: experts chosen by sigmoids and a bias, one that all tokens use, and MLPs without
experts in the first layers. Its layer for multi-token prediction is not loaded."""

from collections.abc import Mapping

import torch

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.traits import FamilyTraits
from adapters.models.mixtures.experts import DenseFirst, ExpertNames
from engine.errors import StartupError
from engine.worker.ports import ExpertGroups, ModelShape, Routing

MAX_GROUPS = 62  # a bit of an integer for each


class Glm4Moe(DenseFirst):
    """`Glm4MoeForCausalLM`; experts may be in groups (DeepSeek V3)."""

    names = ExpertNames(shared="shared_experts", gates_shared=False)
    renormalizes = True  # unless config.json says otherwise
    has_sigmoids = True
    num_best = 2  # experts of a group, which stand for it

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
        self._num_dense = fields.count("first_k_dense_replace", 1)
        self._dense_size = fields.integer("intermediate_size")
        factor, top_k = (
            fields.number("routed_scaling_factor", 1.0),
            fields.integer("num_experts_per_tok", 8),
        )
        return Routing(
            top_k,
            renormalizes=fields.flag("norm_topk_prob", self.renormalizes),
            scales=torch.full((self.num_experts(fields),), factor),
            has_sigmoids=self.has_sigmoids,
            groups=self.groups(fields, top_k),
        )

    def groups(self, fields: Fields, top_k: int) -> ExpertGroups | None:
        """`n_group` groups of experts, of which a token uses `topk_group`; None for a single one.

        Raises `StartupError` for numbers that do not go together.
        """
        count, num_experts = fields.integer("n_group", 1), self.num_experts(fields)
        if count == 1:
            return None
        chosen, size = fields.integer("topk_group"), num_experts // count
        if num_experts % count or count > MAX_GROUPS or size < self.num_best:
            raise StartupError(
                f"{fields.where}: n_group={count} does not divide n_routed_experts={num_experts} "
                f"into at most {MAX_GROUPS} groups of {self.num_best} experts or more"
            )
        if chosen > min(count, top_k) or chosen * size < top_k:
            raise StartupError(
                f"{fields.where}: topk_group={chosen} does not fit n_group={count} and "
                f"num_experts_per_tok={top_k}"
            )
        return ExpertGroups(count, chosen, self.num_best)
