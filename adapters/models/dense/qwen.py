"""Qwen 2 and 2.5: Llama with biases on q, k and v. Qwen 3: with an RMS norm on each head of q and k
instead, and an explicit head size."""

from adapters.models.base.fields import Fields
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FULL, FamilyTraits
from engine.worker.ports import AttentionOptions


class Qwen2(RotaryFamily):
    """`sliding_window` is in every config but only applies if `use_sliding_window` is true."""

    def traits(self, fields: Fields) -> FamilyTraits:
        return FamilyTraits(qkv_bias=True)

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        fields.reject_unless("use_sliding_window", False)
        fields.reject_unless("layer_types", [FULL] * num_layers)
        return ()


class Qwen3(Qwen2):
    """All attention projections have biases or none has, as config.json says."""

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias, qk_norm="head")

    def head_dim(self, fields: Fields, default: int) -> int:
        return fields.integer("head_dim", 128)
