"""Mistral: Llama with an optional sliding window over all layers."""

from adapters.models.fields import Fields
from adapters.models.rotary import RotaryFamily, Traits


class Mistral(RotaryFamily):
    """Null or absent `sliding_window` means full attention."""

    def traits(self, fields: Fields) -> Traits:
        fields.refuse("layer_types", ["full_attention"] * self.shape.num_layers)
        return Traits()

    def window(self, fields: Fields) -> int | None:
        return None if fields.get("sliding_window") is None else fields.integer("sliding_window")
