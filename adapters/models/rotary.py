"""Llama-like decoders: rotary positions, RMS norm, gated MLP. A family says how it differs.

Tensor names are those of Hugging Face's `model.layers.N.…` checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.models.fields import Fields
from engine.errors import RefusedToStart
from engine.worker.layers import (
    AttentionBlock,
    Block,
    Decoder,
    LinearScaling,
    Llama3Scaling,
    Mlp,
    inverse_frequencies,
)
from engine.worker.ports import Linear, ModelShape, Norm, Operators, WeightSource


@dataclass(frozen=True, slots=True)
class Traits:
    """Where a family or checkpoint departs from plain Llama."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class RotarySize:
    """What the layers need beyond the shape."""

    inner: int
    eps: float
    activation: str
    tied: bool
    inverse: Tensor


class RotaryFamily(ABC):
    """A `ModelFamily`; subclasses give `window` and `traits` and refuse what they must."""

    ignored_weights: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields(config)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        self.shape = ModelShape(
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=self.head_dim(fields, hidden // heads),
            hidden_size=hidden,
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            window=self.window(fields),
        )
        if heads % self.shape.num_kv_heads:
            raise RefusedToStart("config.json: num_key_value_heads does not divide the heads")
        self._traits = self.traits(fields)
        self._size = RotarySize(
            inner=fields.integer("intermediate_size"),
            eps=fields.number("rms_norm_eps", 1e-6),
            activation=fields.activation("hidden_act", "silu"),
            tied=fields.flag("tie_word_embeddings", False),
            inverse=read_frequencies(fields, self.shape),
        )

    @abstractmethod
    def traits(self, fields: Fields) -> Traits: ...

    def window(self, fields: Fields) -> int | None:
        """The sliding window; refuses fields that ask for one the family does not do."""
        fields.refuse("sliding_window")
        return None

    def head_dim(self, fields: Fields, default: int) -> int:
        return fields.integer("head_dim", default)

    def build(self, weights: WeightSource, span: range, operators: Operators) -> Decoder:
        """See `ModelFamily`."""
        shape, tied = self.shape, self._size.tied
        is_first, is_last = span.start == 0, span.stop == shape.num_layers
        tokens = norm = head = None
        if is_first or (is_last and tied):
            tokens = weights.take("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        if is_last:
            norm = self._norm(weights, "model.norm", shape.hidden_size, operators)
            head = operators.linear([self._head(weights, tokens)], None)
        return Decoder(
            blocks=tuple(self._block(weights, layer, span, operators) for layer in span),
            tokens=tokens if is_first else None,
            inverse=self._size.inverse,
            norm=norm,
            head=head,
        )

    def _head(self, weights: WeightSource, tokens: Tensor | None) -> Tensor:
        shape = self.shape
        if self._size.tied and tokens is not None:
            if weights.has("lm_head.weight"):
                weights.take("lm_head.weight", shape.vocab_size, shape.hidden_size)
            return tokens
        return weights.take("lm_head.weight", shape.vocab_size, shape.hidden_size)

    def _norm(self, weights: WeightSource, name: str, dim: int, operators: Operators) -> Norm:
        return operators.rms_norm(weights.take(f"{name}.weight", dim), self._size.eps)

    def _block(self, weights: WeightSource, layer: int, span: range, operators: Operators) -> Block:
        shape, size, traits = self.shape, self._size, self._traits
        at = f"model.layers.{layer}"
        hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
        fused = Fused(weights, operators)
        mlp = Mlp(
            up=fused(
                traits.mlp_bias,
                hidden,
                {f"{at}.mlp.gate_proj": size.inner, f"{at}.mlp.up_proj": size.inner},
            ),
            down=fused(traits.mlp_bias, size.inner, {f"{at}.mlp.down_proj": hidden}),
            activation=operators.activation(size.activation, is_gated=True),
        )
        kv_width = shape.num_kv_heads * shape.head_dim
        heads = {f"{at}.self_attn.q_proj": width}
        heads |= {f"{at}.self_attn.{name}_proj": kv_width for name in "kv"}
        norms = [
            self._norm(weights, f"{at}.self_attn.{name}_norm", shape.head_dim, operators)
            for name in "qk"
            if traits.qk_norm
        ]
        attention = AttentionBlock(
            layer - span.start,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            operators,
            fused(traits.qkv_bias, hidden, heads),
            fused(traits.out_bias, width, {f"{at}.self_attn.o_proj": hidden}),
            *norms,
        )
        return Block(
            attention_norm=self._norm(weights, f"{at}.input_layernorm", hidden, operators),
            attention=attention,
            mlp_norm=self._norm(weights, f"{at}.post_attention_layernorm", hidden, operators),
            mlp=mlp,
        )


@dataclass(frozen=True, slots=True)
class Fused:
    """Makes one linear of several that read the same input, one below the other."""

    weights: WeightSource
    operators: Operators

    def __call__(self, has_bias: bool, inputs: int, outputs: Mapping[str, int]) -> Linear:
        """`outputs` are tensor names without `.weight` and their rows."""
        take = self.weights.take
        parts = [take(f"{name}.weight", rows, inputs) for name, rows in outputs.items()]
        bias = None
        if has_bias:
            bias = torch.cat([take(f"{name}.bias", rows) for name, rows in outputs.items()])
        return self.operators.linear(parts, bias)


def read_frequencies(fields: Fields, shape: ModelShape) -> Tensor:
    """Rotary frequencies from `rope_parameters`, or `rope_theta` and `rope_scaling` before it."""
    rope = fields.child("rope_parameters") or fields.child("rope_scaling")
    rope = rope or Fields({}, "config.json: rope_parameters")
    for scope in (fields, rope):
        scope.refuse("partial_rotary_factor", 1.0)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling: Llama3Scaling | LinearScaling | None = None
    if kind == "linear":
        scaling = LinearScaling(rope.number("factor"))
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_positions=rope.integer(
                "original_max_position_embeddings", shape.max_positions
            ),
        )
    elif kind != "default":
        raise RefusedToStart(f"{rope.where}: rope type {kind!r} is not supported")
    return inverse_frequencies(shape.head_dim, theta, scaling)
