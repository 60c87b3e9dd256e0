"""StableLM: Llama with LayerNorm and RoPE on a quarter of each head."""

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import FamilyTraits
from engine.worker.ports import ModelShape


class StableLM(RotaryFamily):
    """Checkpoints with parallel residuals or norms of q and k (12B) are not supported."""

    eps_field = "layer_norm_eps"

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("use_parallel_residual", False)
        fields.reject_unless("qk_layernorm", False)
        return FamilyTraits(qkv_bias=fields.flag("use_qkv_bias", False), has_layer_norm=True)

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions, share=0.25)
        return LayerRopes.same(source, shape.num_layers)
