"""Llama 2 and 3, and other models of the architecture LlamaForCausalLM."""

from adapters.models.base.fields import Fields
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits


class Llama(RotaryFamily):
    """Biases as config.json says; no sliding window."""

    def traits(self, fields: Fields) -> FamilyTraits:
        attention_bias = fields.flag("attention_bias", False)
        return FamilyTraits(
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
        )
