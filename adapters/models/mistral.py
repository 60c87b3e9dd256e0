"""Mistral: Llama with an optional sliding window over all layers."""

from adapters.models.fields import Fields
from adapters.models.rotary import FamilyTraits, RotaryFamily


class Mistral(RotaryFamily):
    """If `sliding_window` is null or absent, attention is full."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("layer_types", ["full_attention"] * self.shape.num_layers)
        return FamilyTraits()

    def window(self, fields: Fields) -> int | None:
        return None if fields.get("sliding_window") is None else fields.integer("sliding_window")
