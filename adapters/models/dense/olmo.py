"""OLMo 2: norms of what layers add instead of what they read; norms over all heads of q and k.
OLMo 3: the same, with a sliding window in three of four layers."""

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, ropes_by_type
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import (
    ONLY_POST_NORMS,
    FamilyTraits,
    every_nth_full,
    layer_types,
    windowed,
)
from engine.worker.ports import AttentionOptions, ModelShape

PERIOD = 4


class Olmo2(RotaryFamily):
    """All attention projections have biases or none has, as config.json says."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("clip_qkv")
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(
            qkv_bias=has_bias, out_bias=has_bias, qk_norm="width", norms=ONLY_POST_NORMS
        )


class Olmo3(Olmo2):
    """RoPE scaling (YaRN) applies to layers with full attention only."""

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        return windowed(self._types(fields, num_layers), fields.integer("sliding_window", 4096))

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        types = self._types(fields, shape.num_layers)
        thetas = dict.fromkeys(types, fields.number("rope_theta", 500000.0))
        return ropes_by_type(fields, shape, types, thetas)

    def _types(self, fields: Fields, num_layers: int) -> tuple[str, ...]:
        return layer_types(fields, num_layers, every_nth_full(num_layers, PERIOD))
