"""Llama 2 and 3, and what calls itself LlamaForCausalLM."""

from adapters.models.fields import Fields
from adapters.models.rotary import RotaryFamily, Traits


class Llama(RotaryFamily):
    """Biases are the checkpoint's choice; no sliding window."""

    def traits(self, fields: Fields) -> Traits:
        attention_bias = fields.flag("attention_bias", False)
        return Traits(
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )
