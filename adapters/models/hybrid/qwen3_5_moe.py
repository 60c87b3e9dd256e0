"""Qwen 3.5 and 3.6 MoE: their layers with mixtures of experts, and one that all tokens use."""

from adapters.models.base.fields import Fields
from adapters.models.hybrid.qwen3_5 import Qwen35, Qwen35Multimodal
from adapters.models.mixtures.qwen3_moe import SharingQwen
from engine.worker.ports import Routing


class Qwen35Moe(SharingQwen, Qwen35):
    """The probabilities of the chosen experts are divided by their sum."""

    def routing(self, fields: Fields) -> Routing:
        return Routing(fields.integer("num_experts_per_tok", 8), renormalizes=True)


class Qwen35MoeMultimodal(Qwen35Moe, Qwen35Multimodal):
    """`Qwen3_5MoeForConditionalGeneration`: the text model and its image encoder."""
