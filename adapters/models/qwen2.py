"""Qwen 2 and 2.5: Llama with biases on q, k and v."""

from adapters.models.fields import Fields
from adapters.models.rotary import RotaryFamily, Traits


class Qwen2(RotaryFamily):
    """`sliding_window` is in every config but counts only with `use_sliding_window`."""

    def traits(self, fields: Fields) -> Traits:
        return Traits(qkv_bias=True)

    def window(self, fields: Fields) -> None:
        fields.refuse("use_sliding_window", False)
        fields.refuse("layer_types", ["full_attention"] * fields.integer("num_hidden_layers"))
