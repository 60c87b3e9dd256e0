"""OLMo 2: norms of what layers add instead of what they read; norms over all heads of q and k."""

from adapters.models.base.fields import Fields
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import ONLY_POST_NORMS, FamilyTraits


class Olmo2(RotaryFamily):
    """All attention projections have biases or none has, as config.json says."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("clip_qkv")
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(
            qkv_bias=has_bias, out_bias=has_bias, qk_norm="width", norms=ONLY_POST_NORMS
        )
