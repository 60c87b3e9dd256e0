"""Qwen 3: Llama with an RMS norm on each head of q and k, and an explicit head size."""

from adapters.models.base.fields import Fields
from adapters.models.base.traits import FamilyTraits
from adapters.models.dense.qwen2 import Qwen2


class Qwen3(Qwen2):
    """All attention projections have biases or none has, as config.json says."""

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias, qk_norm="head")

    def head_dim(self, fields: Fields, default: int) -> int:
        return fields.integer("head_dim", 128)
