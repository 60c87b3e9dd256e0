"""Phi-3, Phi-3.5 and Phi-4: Llama with fused tensors, partial RoPE (Phi-4-mini) and LongRoPE."""

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits
from engine.worker.ports import AttentionOptions, ModelShape


class Phi3(RotaryFamily):
    """A sliding window that is no shorter than the context is none."""

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("attention_bias", False)
        return FamilyTraits(is_fused=True)

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        if fields.get("sliding_window") is None:
            return ()
        window = fields.integer("sliding_window")
        if window >= fields.integer("max_position_embeddings"):
            return ()
        return (AttentionOptions(window=window),) * num_layers

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions)
        return LayerRopes.same(source, shape.num_layers)
