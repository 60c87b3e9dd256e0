"""MiniCPM 1 to 4: multipliers of embeddings, residuals and logits. MiniCPM 3 has attention with
latent vectors (MLA), the others are Llama otherwise."""

from collections.abc import Mapping
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.latent_attention import LatentFamily
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.traits import FamilyTraits
from adapters.models.dense.llama import Llama
from engine.worker.ports import ModelShape


def _multiplied(traits: FamilyTraits, fields: Fields, shape: ModelShape) -> FamilyTraits:
    """The traits with `scale_emb`, `scale_depth` and `dim_model_base`."""
    return replace(
        traits,
        residual_scale=fields.number("scale_depth", shape.num_layers**0.5) / shape.num_layers**0.5,
        embedding_scale=fields.number("scale_emb", 12),
        logit_scale=fields.number("dim_model_base", shape.hidden_size) / shape.hidden_size,
    )


class MiniCPM(Llama):
    """`MiniCPMForCausalLM` (MiniCPM 1, 2, 4 and 4.1) without experts."""

    defaults: Mapping[str, object] = {
        "tie_word_embeddings": True,
        "scale_emb": 1,
        "scale_depth": 1,
        "dim_model_base": 1,
    }

    def traits(self, fields: Fields) -> FamilyTraits:
        return _multiplied(super().traits(fields), fields, self.shape)

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        """Sequences of `dense_len` tokens and more have sparse attention (InfLLM-v2), which is not
        computed: the context is shorter."""
        fields.reject_unless("num_experts", 0)
        sparse = fields.child("sparse_config")
        if sparse is None:
            return shape
        longest = max(sparse.integer("dense_len", 8192) - 1, 1)
        return replace(shape, max_positions=min(shape.max_positions, longest))

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        positions = fields.integer("max_position_embeddings")
        return LayerRopes.same(read_rope(fields, shape.head_dim, positions), shape.num_layers)


class MiniCPM3(LatentFamily):
    """`MiniCPM3ForCausalLM`. RoPE pairs the halves of its dimensions."""

    pairs_neighbours = False
    defaults: Mapping[str, object] = {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    }

    def traits(self, fields: Fields) -> FamilyTraits:
        return _multiplied(super().traits(fields), fields, self.shape)

    def head_dim(self, fields: Fields, default: int) -> int:
        values = {"v_head_dim": default} | {
            name: value for name, value in fields.values.items() if value is not None
        }
        if fields.get("q_lora_rank") is None:
            values["q_lora_rank"] = 0
        return super().head_dim(Fields(values, fields.where), default)
