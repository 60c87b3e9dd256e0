"""GLM-4: RoPE turns neighbours in half of each head, gate and up are one tensor; the models of 2025
(`Glm4ForCausalLM`) have norms of what layers add, too."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.paired_rows import PairedRows
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import PRE_NORMS, FamilyTraits, NormNames
from engine.worker.model.layers import Decoder
from engine.worker.ports import ModelShape, Operators, Shard, WeightSource


class Glm(RotaryFamily):
    """`GlmForCausalLM`: GLM-4-9B and GLM-Edge."""

    norms = PRE_NORMS
    defaults: Mapping[str, object] = {"attention_bias": True}

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", True)
        return FamilyTraits(qkv_bias=has_bias, has_fused_mlp=True, norms=self.norms)

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions, share=0.5)
        return LayerRopes.same(source, shape.num_layers)

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        rotated = self._ropes.sources[0].dim
        return super().build(PairedRows(weights, shard.shape.head_dim, rotated), shard, operators)


class Glm4(Glm):
    """`Glm4ForCausalLM`: GLM-4-0414 and GLM-Z1."""

    norms = NormNames(
        attention="input_layernorm",
        mlp="post_attention_layernorm",
        attention_post="post_self_attn_layernorm",
        mlp_post="post_mlp_layernorm",
    )
