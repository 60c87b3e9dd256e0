"""OLMoE: a mixture of experts in every layer, and norms over all heads of q and of k."""

from adapters.models.base.fields import Fields
from adapters.models.base.traits import FamilyTraits
from adapters.models.mixtures.experts import ExpertFamily
from engine.worker.ports import Routing


class Olmoe(ExpertFamily):
    """Clipping of q, k and v is not supported; no published checkpoint uses it."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("clip_qkv")
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias, qk_norm="width")

    def routing(self, fields: Fields) -> Routing:
        return Routing(
            fields.integer("num_experts_per_tok", 8),
            renormalizes=fields.flag("norm_topk_prob", False),
        )
