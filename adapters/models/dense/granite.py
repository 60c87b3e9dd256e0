"""Granite 3 and 4 (dense): Llama with multipliers of embeddings, scores, residuals and logits."""

from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.traits import FamilyTraits
from adapters.models.dense.llama import Llama
from engine.worker.ports import AttentionOptions


class Granite(Llama):
    """`attention_multiplier` is the scale of the scores, `logits_scaling` divides the logits."""

    def traits(self, fields: Fields) -> FamilyTraits:
        return replace(
            super().traits(fields),
            residual_scale=fields.number("residual_multiplier", 1.0),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        )

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        super().attention(fields, num_layers)
        return (AttentionOptions(scale=fields.number("attention_multiplier", 1.0)),) * num_layers
