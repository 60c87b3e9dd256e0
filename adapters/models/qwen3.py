"""Qwen 3: Llama with an RMS norm on each head of q and k, and a head size of its own."""

from adapters.models.fields import Fields
from adapters.models.qwen2 import Qwen2
from adapters.models.rotary import Traits


class Qwen3(Qwen2):
    """Biases on all of attention or none, as the checkpoint says."""

    def traits(self, fields: Fields) -> Traits:
        has_bias = fields.flag("attention_bias", False)
        return Traits(qkv_bias=has_bias, out_bias=has_bias, qk_norm=True)

    def head_dim(self, fields: Fields, default: int) -> int:
        return fields.integer("head_dim", 128)
