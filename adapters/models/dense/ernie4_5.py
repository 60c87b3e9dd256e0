"""ERNIE 4.5, dense: Llama whose RoPE turns neighbouring dimensions of a head."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.paired_rows import PairedRows
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits
from engine.worker.model.layers import Decoder
from engine.worker.ports import Operators, Shard, WeightSource


class Ernie45(RotaryFamily):
    """All linears of the layers have biases or none has, as config.json says."""

    defaults: Mapping[str, object] = {"tie_word_embeddings": True, "rope_theta": 500000.0}

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("use_bias", False)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias, mlp_bias=has_bias)

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        head_dim = shard.shape.head_dim
        return super().build(PairedRows(weights, head_dim, head_dim), shard, operators)
