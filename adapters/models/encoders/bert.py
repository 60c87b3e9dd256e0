"""BERT and its relatives: encoders with learned positions and norms after attention and MLP.

MiniLM, BGE, E5 and GTE are BERT; multilingual E5 and BGE-M3 are XLM-RoBERTa.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from adapters.models.base.equal_heads import equal_heads
from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from engine.worker.model.encoder import Encoder, PostNormLayer
from engine.worker.model.layers import AttentionBlock, Embedding, Mlp
from engine.worker.ports import (
    AttentionOptions,
    Norm,
    Operators,
    Shard,
    TensorSlice,
    WeightSource,
)


@dataclass(frozen=True, slots=True)
class BertSettings:
    """Parameters that are not part of the shape."""

    eps: float
    activation: str
    num_types: int


class Bert:
    """A `ModelFamily`. Tensors of a model with a head begin with the name of the base model."""

    # A pooler is used by sequence classifiers only, the head of pretraining never.
    ignored_weights: tuple[str, ...] = (
        "*embeddings.position_ids",
        "*pooler.dense.*",
        "cls.*",
        "lm_head.*",
    )
    base: ClassVar[str] = "bert"

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields(config)
        shape = equal_heads(fields)
        fields.reject_unless("position_embedding_type", "absolute")
        fields.reject_unless("is_decoder", False)
        fields.reject_unless("embedding_size", shape.hidden_size)
        self._first_position = self.first_position(fields)
        self.shape = replace(
            shape,
            max_positions=shape.max_positions - self._first_position,
            attention=(AttentionOptions(is_causal=False),) * shape.num_layers,
        )
        self._settings = BertSettings(
            eps=fields.number("layer_norm_eps", 1e-12),
            activation=fields.activation("hidden_act", "gelu"),
            num_types=fields.integer("type_vocab_size", 2),
        )

    def first_position(self, fields: Fields) -> int:
        """The row of the position table for the first token."""
        return 0

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Encoder:
        has_root = weights.has(f"{self.base}.embeddings.word_embeddings.weight")
        root = f"{self.base}." if has_root else ""
        projections = Projections(weights, shard, operators)
        blocks = tuple(
            self._layer(projections, f"{root}encoder.layer.{layer}", layer - shard.span.start)
            for layer in shard.span
        )
        if not shard.is_first:
            return Encoder(blocks)
        at, shape, part = f"{root}embeddings", self.shape, shard.vocabulary
        hidden = shape.hidden_size
        tokens = TensorSlice(f"{at}.word_embeddings.weight", (part.size, hidden), rows=part.run)
        num_rows = self._first_position + shape.max_positions
        positions = TensorSlice(
            f"{at}.position_embeddings.weight",
            (num_rows, hidden),
            rows=range(self._first_position, num_rows),
        )
        types = TensorSlice(
            f"{at}.token_type_embeddings.weight", (self._settings.num_types, hidden)
        )
        return Encoder(
            blocks,
            tokens=Embedding(weights.lookup(tokens), part, shard.all_reduce),
            learned_positions=weights.tensor(positions),
            token_types=weights.tensor(types),
            embedding_norm=self._norm(weights, f"{at}.LayerNorm", operators),
        )

    def _norm(self, weights: WeightSource, name: str, operators: Operators) -> Norm:
        weight, bias = (
            weights.tensor(TensorSlice(f"{name}.{part}", (self.shape.hidden_size,)))
            for part in ("weight", "bias")
        )
        return operators.layer_norm(weight, bias, self._settings.eps)

    def _layer(self, projections: Projections, at: str, layer: int) -> PostNormLayer:
        weights, shard, operators = projections.weights, projections.shard, projections.operators
        width = shard.heads.times(shard.shape.head_dim)
        names = [f"{at}.attention.self.{name}" for name in ("query", "key", "value")]
        up = {f"{at}.intermediate.dense": shard.inner}
        return PostNormLayer(
            attention=AttentionBlock(
                layer=layer,
                num_heads=len(shard.heads.run),
                num_kv_heads=len(shard.kv_heads.run),
                head_dim=shard.shape.head_dim,
                qkv=projections.from_hidden(dict.fromkeys(names, width), has_bias=True),
                out=projections.to_hidden(f"{at}.attention.output.dense", width, has_bias=True),
            ),
            attention_norm=self._norm(weights, f"{at}.attention.output.LayerNorm", operators),
            mlp=Mlp(
                up=projections.from_hidden(up, has_bias=True),
                down=projections.to_hidden(f"{at}.output.dense", shard.inner, has_bias=True),
                activation=operators.activation(self._settings.activation, is_gated=False),
            ),
            mlp_norm=self._norm(weights, f"{at}.output.LayerNorm", operators),
        )


class Roberta(Bert):
    """RoBERTa and XLM-RoBERTa: positions are counted from the padding token's id on."""

    base = "roberta"

    def first_position(self, fields: Fields) -> int:
        return fields.integer("pad_token_id", 1) + 1
