"""MiniCPM 3: attention with latent vectors (MLA), and multipliers of embeddings, residuals and
logits."""

from collections.abc import Mapping
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.latent_attention import LatentFamily
from adapters.models.base.traits import FamilyTraits


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
        hidden, num_layers = self.shape.hidden_size, self.shape.num_layers
        return replace(
            super().traits(fields),
            residual_scale=fields.number("scale_depth", num_layers**0.5) / num_layers**0.5,
            embedding_scale=fields.number("scale_emb", 12),
            logit_scale=fields.number("dim_model_base", hidden) / hidden,
        )

    def head_dim(self, fields: Fields, default: int) -> int:
        values = {"v_head_dim": default} | {
            name: value for name, value in fields.values.items() if value is not None
        }
        if fields.get("q_lora_rank") is None:
            values["q_lora_rank"] = 0
        return super().head_dim(Fields(values, fields.where), default)
