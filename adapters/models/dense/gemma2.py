"""Gemma 2: soft caps of scores and logits, norms before and after each block, and a sliding window
in every other layer (arXiv:2408.00118)."""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import (
    FOUR_NORMS,
    FamilyTraits,
    every_nth_full,
    layer_types,
    windowed,
)
from engine.worker.ports import AttentionOptions


class Gemma2(RotaryFamily):
    """The weights of RMS norms are stored less 1; embeddings are multiplied by sqrt(hidden)."""

    activation_field = "hidden_activation"
    defaults: Mapping[str, object] = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
    }
    period = 2  # each such layer has full attention, where config.json has no `layer_types`
    qk_norm = ""

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(
            qkv_bias=has_bias,
            out_bias=has_bias,
            qk_norm=self.qk_norm,
            norms=FOUR_NORMS,
            norm_offset=0.0 if fields.flag("norms_include_one", False) else 1.0,  # in GGUF files
            embedding_scale=self.shape.hidden_size**0.5,
            logit_cap=fields.optional_number("final_logit_softcapping"),
        )

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        fields.reject_unless("use_bidirectional_attention", False)
        return windowed(
            self.layer_types(fields, num_layers),
            fields.integer("sliding_window"),
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            soft_cap=fields.optional_number("attn_logit_softcapping"),
        )

    def layer_types(self, fields: Fields, num_layers: int) -> tuple[str, ...]:
        """ "sliding_attention" or "full_attention" for each layer."""
        period = fields.integer("sliding_window_pattern", self.period)
        return layer_types(fields, num_layers, every_nth_full(num_layers, period))
