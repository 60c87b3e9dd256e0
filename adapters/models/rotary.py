"""The base of Llama-like decoders: RoPE, RMS norm, gated MLP. Families override what differs.

Tensor names are those of Hugging Face's `model.layers.N.…` checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from adapters.models.fields import Fields
from adapters.models.projections import Projections, embedding_and_head
from engine.errors import StartupError
from engine.worker.model.layers import (
    AttentionBlock,
    Decoder,
    DecoderLayer,
    FeedForward,
    GivenScaling,
    LinearScaling,
    Llama3Scaling,
    Mlp,
    inverse_frequencies,
)
from engine.worker.ports import (
    ModelShape,
    Norm,
    Operators,
    RankPart,
    Shard,
    TensorSlice,
    WeightSource,
)


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """How a family or checkpoint differs from Llama."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class RotarySettings:
    """Parameters of the layers that are not part of the shape."""

    eps: float
    activation: str
    tied: bool
    inverse: Tensor


class RotaryFamily(ABC):
    """A `ModelFamily`. Subclasses define `traits` and `window` and reject unsupported fields."""

    ignored_weights: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields(config)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        head_dim = self.head_dim(fields, hidden // heads)
        inner = self.inner_size(fields)
        shape = ModelShape(
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            inner_size=inner,
            layer_parameters=hidden * (2 * (heads + kv_heads) * head_dim + 3 * inner),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            window=self.window(fields),
        )
        self.shape = self.sized(fields, shape)
        if heads % self.shape.num_kv_heads:
            raise StartupError(
                f"config.json: num_key_value_heads={kv_heads} does not divide "
                f"num_attention_heads={heads}"
            )
        self._traits = self.traits(fields)
        self._settings = RotarySettings(
            eps=fields.number("rms_norm_eps", 1e-6),
            activation=fields.activation("hidden_act", "silu"),
            tied=fields.flag("tie_word_embeddings", False),
            inverse=read_frequencies(fields, self.shape),
        )

    @abstractmethod
    def traits(self, fields: Fields) -> FamilyTraits: ...

    def window(self, fields: Fields) -> int | None:
        """The sliding window in tokens. Raises `StartupError` if the family does not support it."""
        fields.reject_unless("sliding_window")
        return None

    def head_dim(self, fields: Fields, default: int) -> int:
        return fields.integer("head_dim", default)

    def inner_size(self, fields: Fields) -> int:
        """The width of the MLP."""
        return fields.integer("intermediate_size")

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        """The shape with what other layers than Llama's change in it."""
        return shape

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        projections = Projections(weights, shard, operators)
        tokens, head = embedding_and_head(
            projections, "model.embed_tokens.weight", is_tied=self._settings.tied
        )
        norm = None
        if shard.is_last:
            norm = self._norm(weights, "model.norm", shard.shape.hidden_size, operators)
        return Decoder(
            blocks=tuple(self._block(projections, layer) for layer in shard.span),
            tokens=tokens,
            inverse=operators.constant(self._settings.inverse),
            norm=norm,
            head=head,
        )

    def _norm(self, weights: WeightSource, name: str, dim: int, operators: Operators) -> Norm:
        return operators.rms_norm(
            weights.tensor(TensorSlice(f"{name}.weight", (dim,))), self._settings.eps
        )

    def _block(self, projections: Projections, layer: int) -> DecoderLayer:
        weights, shard, operators = projections.weights, projections.shard, projections.operators
        hidden, at = shard.shape.hidden_size, f"model.layers.{layer}"
        return DecoderLayer(
            attention_norm=self._norm(weights, f"{at}.input_layernorm", hidden, operators),
            attention=self._attention(projections, at, layer - shard.span.start),
            mlp_norm=self._norm(weights, f"{at}.post_attention_layernorm", hidden, operators),
            mlp=self._mlp(projections, f"{at}.mlp"),
        )

    def _attention(self, projections: Projections, at: str, layer: int) -> AttentionBlock:
        shard, traits, operators = projections.shard, self._traits, projections.operators
        dim = shard.shape.head_dim
        width, kv_width = shard.heads.times(dim), shard.kv_heads.times(dim)
        wanted = {"q": width, "k": kv_width, "v": kv_width}
        norms = [
            self._norm(projections.weights, f"{at}.self_attn.{name}_norm", dim, operators)
            for name in "qk"
            if traits.qk_norm
        ]
        return AttentionBlock(
            layer,
            len(shard.heads.run),
            len(shard.kv_heads.run),
            dim,
            projections.from_hidden(
                {f"{at}.self_attn.{name}_proj": part for name, part in wanted.items()},
                has_bias=traits.qkv_bias,
            ),
            projections.to_hidden(f"{at}.self_attn.o_proj", width, has_bias=traits.out_bias),
            *norms,
        )

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        inner, has_bias = projections.shard.inner, self._traits.mlp_bias
        wanted: dict[str, RankPart] = {f"{at}.gate_proj": inner, f"{at}.up_proj": inner}
        return Mlp(
            up=projections.from_hidden(wanted, has_bias=has_bias),
            down=projections.to_hidden(f"{at}.down_proj", inner, has_bias=has_bias),
            activation=projections.operators.activation(self._settings.activation, is_gated=True),
        )


def read_frequencies(fields: Fields, shape: ModelShape) -> Tensor:
    """The inverse RoPE frequencies [head_dim / 2] from `rope_parameters`, or from the older fields
    `rope_theta` and `rope_scaling`."""
    rope = fields.child("rope_parameters") or fields.child("rope_scaling")
    rope = rope or Fields({}, "config.json: rope_parameters")
    for scope in (fields, rope):
        scope.reject_unless("partial_rotary_factor", 1.0)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling: Llama3Scaling | LinearScaling | GivenScaling | None = None
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
    elif kind == "factors":
        scaling = GivenScaling(rope.numbers("factors", shape.head_dim // 2))
    elif kind != "default":
        raise StartupError(f"{rope.where}: rope type {kind!r} is not supported")
    return inverse_frequencies(shape.head_dim, theta, scaling)
