"""ModernBERT (Warner et al., 2024): an encoder with RoPE, gated MLPs, windows in most layers."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from adapters.models.base.equal_heads import equal_heads
from adapters.models.base.fields import Fields
from adapters.models.base.projections import Fused, Projections
from adapters.models.base.rope_fields import require_even
from engine.errors import StartupError
from engine.worker.model.encoder import Encoder
from engine.worker.model.layers import AttentionBlock, DecoderLayer, Embedding, Mlp
from engine.worker.model.rope import Rope, inverse_frequencies
from engine.worker.ports import (
    AttentionOptions,
    Norm,
    Operators,
    Shard,
    TensorSlice,
    WeightSource,
)

THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
OLD_THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


class ModernBert:
    """A `ModelFamily`. Norms have no biases; the first layer has no norm before attention."""

    ignored_weights: tuple[str, ...] = ("head.*", "decoder.*", "*.inv_freq")

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields(config)
        shape = equal_heads(fields, mlp_matrices=3)
        require_even(shape.head_dim, shape.head_dim, fields.where)
        for name in ("attention_bias", "mlp_bias", "norm_bias"):
            fields.reject_unless(name, False)
        self._types = self._layer_types(fields, shape.num_layers)
        # A token sees half of the window on each side, and itself.
        window = fields.integer("local_attention", 128) // 2 + 1
        options = {
            "full_attention": AttentionOptions(is_causal=False),
            "sliding_attention": AttentionOptions(window=window, is_causal=False),
        }
        self.shape = replace(shape, attention=tuple(options[kind] for kind in self._types))
        self._eps = fields.number("norm_eps", 1e-5)
        self._activation = fields.activation("hidden_activation", "gelu")
        self._thetas = {kind: self._theta(fields, kind) for kind in THETAS}

    @staticmethod
    def _layer_types(fields: Fields, layers: int) -> list[str]:
        types = fields.get("layer_types")
        if types is None:
            every = fields.integer("global_attn_every_n_layers", 3)
            return ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
        if not isinstance(types, list) or len(types) != layers or not set(types) <= set(THETAS):
            raise StartupError(f"config.json: layer_types={types!r} is not supported")
        return types

    @staticmethod
    def _theta(fields: Fields, kind: str) -> float:
        default = fields.number(OLD_THETAS[kind], THETAS[kind])
        every = fields.child("rope_parameters")
        own = None if every is None else every.child(kind)
        if own is None:
            return default
        own.reject_unless("rope_type", "default")
        return own.number("rope_theta", default)

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Encoder:
        root = "model." if weights.has("model.embeddings.tok_embeddings.weight") else ""
        projections = Projections(weights, shard, operators)
        blocks = tuple(
            self._layer(projections, f"{root}layers.{layer}", layer) for layer in shard.span
        )
        dim = self.shape.head_dim
        ropes = tuple(
            Rope(operators.constant(inverse_frequencies(dim, self._thetas[kind], None)))
            for kind in THETAS
        )
        norm = self._norm(weights, f"{root}final_norm", operators) if shard.is_last else None
        if not shard.is_first:
            return Encoder(blocks, ropes=ropes, norm=norm)
        part = shard.vocabulary
        tokens = TensorSlice(
            f"{root}embeddings.tok_embeddings.weight",
            (part.size, self.shape.hidden_size),
            rows=part.run,
        )
        return Encoder(
            blocks,
            tokens=Embedding(weights.lookup(tokens), part, shard.all_reduce),
            ropes=ropes,
            norm=norm,
            embedding_norm=self._norm(weights, f"{root}embeddings.norm", operators),
        )

    def _norm(self, weights: WeightSource, name: str, operators: Operators) -> Norm:
        weight = weights.tensor(TensorSlice(f"{name}.weight", (self.shape.hidden_size,)))
        return operators.layer_norm(weight, torch.zeros_like(weight), self._eps)

    def _layer(self, projections: Projections, at: str, layer: int) -> DecoderLayer:
        weights, shard, operators = projections.weights, projections.shard, projections.operators
        width = shard.heads.times(shard.shape.head_dim)
        qkv, up = Fused(f"{at}.attn.Wqkv", (width,) * 3), Fused(f"{at}.mlp.Wi", (shard.inner,) * 2)
        return DecoderLayer(
            attention_norm=self._norm(weights, f"{at}.attn_norm", operators) if layer else None,
            attention=AttentionBlock(
                layer=layer - shard.span.start,
                num_heads=len(shard.heads.run),
                num_kv_heads=len(shard.kv_heads.run),
                head_dim=shard.shape.head_dim,
                qkv=projections.from_hidden(qkv, has_bias=False),
                out=projections.to_hidden(f"{at}.attn.Wo", width, has_bias=False),
                rope=list(THETAS).index(self._types[layer]),
            ),
            mlp_norm=self._norm(weights, f"{at}.mlp_norm", operators),
            mlp=Mlp(
                up=projections.from_hidden(up, has_bias=False),
                down=projections.to_hidden(f"{at}.mlp.Wo", shard.inner, has_bias=False),
                activation=operators.activation(self._activation, is_gated=True),
            ),
        )
