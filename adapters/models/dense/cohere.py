"""Command R and Command A: attention and MLP read the same norm, RoPE turns neighbours, and logits
are scaled. Command R7B and A (`Cohere2ForCausalLM`) have windows, and no RoPE in other layers."""

from collections.abc import Mapping

import torch

from adapters.models.base.fields import Fields
from adapters.models.base.paired_rows import PairedRows
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import SLIDING, FamilyTraits, every_nth_full, layer_types, windowed
from engine.worker.model.layers import Decoder, Layer, ParallelLayer
from engine.worker.ports import (
    AttentionOptions,
    ModelShape,
    Norm,
    Operators,
    Shard,
    TensorSlice,
    WeightSource,
)

PERIOD = 4  # every fourth layer of Cohere 2 has full attention


class Cohere(RotaryFamily):
    """`CohereForCausalLM`; norms of q and k (Command R+) are not supported."""

    eps_field = "layer_norm_eps"
    defaults: Mapping[str, object] = {"tie_word_embeddings": True}

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("use_qk_norm", False)
        has_bias = fields.flag("attention_bias", False)
        scale = fields.number("logit_scale", 0.0625)
        return FamilyTraits(qkv_bias=has_bias, out_bias=has_bias, logit_scale=scale)

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        head_dim = shard.shape.head_dim
        return super().build(PairedRows(weights, head_dim, head_dim), shard, operators)

    def _norm(self, projections: Projections, name: str, scale: float = 1.0) -> Norm:
        """A LayerNorm without a bias."""
        size = (projections.shard.shape.hidden_size,)
        weight = projections.weights.tensor(TensorSlice(f"{name}.weight", size)) * scale
        return projections.operators.layer_norm(
            weight, torch.zeros_like(weight), self._settings.eps
        )

    def _layer(self, projections: Projections, layer: int) -> Layer:
        at = f"{projections.root}.layers.{layer}"
        return ParallelLayer(
            norm=self._norm(projections, f"{at}.input_layernorm"),
            attention=self._attention(projections, at, layer),
            mlp=self._mlp(projections, f"{at}.mlp"),
        )


class Cohere2(Cohere):
    """Layers with windows have RoPE, those with full attention have none."""

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        return windowed(self._types(fields, num_layers), fields.integer("sliding_window", 4096))

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions)
        types = self._types(fields, shape.num_layers)
        return LayerRopes((source,), tuple(0 if each == SLIDING else None for each in types))

    @staticmethod
    def _types(fields: Fields, num_layers: int) -> tuple[str, ...]:
        period = fields.integer("sliding_window_pattern", PERIOD)
        return layer_types(fields, num_layers, every_nth_full(num_layers, period))
