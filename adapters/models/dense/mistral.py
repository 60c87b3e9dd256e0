"""Mistral: Llama with an optional sliding window over all layers."""

from adapters.models.base.fields import Fields
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FULL, FamilyTraits
from engine.worker.ports import AttentionOptions


class Mistral(RotaryFamily):
    """If `sliding_window` is null or absent, attention is full."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("layer_types", [FULL] * self.shape.num_layers)
        return FamilyTraits()

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        if fields.get("sliding_window") is None:
            return ()
        return (AttentionOptions(window=fields.integer("sliding_window")),) * num_layers
