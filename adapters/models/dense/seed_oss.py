"""Seed-OSS: Llama with biases of q, k and v, and perhaps of the other linears."""

from adapters.models.base.fields import Fields
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits


class SeedOss(RotaryFamily):
    """Each group of biases is a field of config.json."""

    def traits(self, fields: Fields) -> FamilyTraits:
        return FamilyTraits(
            qkv_bias=fields.flag("attention_bias", True),
            out_bias=fields.flag("attention_out_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )
