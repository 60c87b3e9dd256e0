"""The base of Llama-like decoders: RoPE, norms, gated MLP. Families are data (`FamilyTraits`).

Tensor names are those of Hugging Face's `model.layers.N.…` checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Fused, Projections, embedding_and_head
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.traits import FamilyTraits
from engine.errors import StartupError
from engine.worker.model.layers import (
    AttentionBlock,
    Decoder,
    DecoderLayer,
    FeedForward,
    HeadNorm,
    Layer,
    Mixer,
    Mlp,
    SplitWidthNorm,
    WidthNorm,
)
from engine.worker.ports import (
    AttentionOptions,
    ModelShape,
    Norm,
    Operators,
    RankPart,
    Shard,
    TensorSlice,
    WeightSource,
)


class HeadNorms(NamedTuple):
    """The norms of q and of k; None if the family has none."""

    q: HeadNorm | None = None
    k: HeadNorm | None = None


def head_norms(
    projections: Projections, at: str, traits: FamilyTraits, eps: float, *, has_own_kv: bool
) -> HeadNorms:
    """The norms of the attention named `at`; without KV of its own it has none of k."""
    if not traits.qk_norm:
        return HeadNorms()
    shard = projections.shard
    make = _of_width if traits.qk_norm == "width" else _of_head
    return HeadNorms(
        make(projections, f"{at}.{traits.names.q_norm}.weight", shard.heads, traits, eps),
        make(projections, f"{at}.{traits.names.k_norm}.weight", shard.kv_heads, traits, eps)
        if has_own_kv
        else None,
    )


def _of_head(
    projections: Projections, name: str, heads: RankPart, traits: FamilyTraits, eps: float
) -> HeadNorm:
    weight = projections.weights.tensor(TensorSlice(name, (projections.shard.shape.head_dim,)))
    weight = weight + traits.norm_offset if traits.norm_offset else weight
    return projections.operators.rms_norm(weight, eps)


def _of_width(
    projections: Projections, name: str, heads: RankPart, traits: FamilyTraits, eps: float
) -> HeadNorm:
    shard = projections.shard
    width = heads.times(shard.shape.head_dim)
    weight = projections.weights.tensor(TensorSlice(name, (width.size,), rows=width.run))
    if shard.all_reduce is None:
        return WidthNorm(projections.operators.rms_norm(weight, eps))
    share = heads.size / (shard.num_ranks * len(heads.run))
    return SplitWidthNorm(weight, eps, width.size, share, shard.all_reduce)


@dataclass(frozen=True, slots=True)
class RotarySettings:
    """Parameters of the layers that are not part of the shape."""

    eps: float
    activation: str
    tied: bool


class RotaryFamily(ABC):
    """A `ModelFamily`. Subclasses define `traits`, and `attention` and `ropes` where layers
    differ; they reject fields that they do not support."""

    ignored_weights: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    # Values of fields that checkpoints of this family leave out
    defaults: Mapping[str, object] = {}
    eps_field = "rms_norm_eps"
    token_name = "embed_tokens"
    activation_field = "hidden_act"
    roots: tuple[str, ...] = (
        "model",
    )  # possible prefixes of all tensors but the head; the first that is there

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields({**self.defaults, **self.text_config(config)})
        self.shape = self._shape(fields)
        self._traits = self.traits(fields)
        self._settings = RotarySettings(
            eps=fields.number(self.eps_field, 1e-6),
            activation=fields.activation(self.activation_field, "silu"),
            tied=fields.flag("tie_word_embeddings", False),
        )
        self._ropes = self.ropes(fields, self.shape)
        switches = [each.original_positions for each in self._ropes.sources]
        known = [each for each in switches if each is not None]
        self.shape = replace(self.shape, original_positions=min(known, default=None))

    @abstractmethod
    def traits(self, fields: Fields) -> FamilyTraits: ...

    def text_config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """The object of config.json that describes the decoder."""
        return config

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        """The options of each layer, or none if all have full attention.

        Raises `StartupError` for a field that the family does not support.
        """
        fields.reject_unless("sliding_window")
        return ()

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        """The RoPE of each layer."""
        for scope in (fields, fields.child("rope_parameters") or fields):
            scope.reject_unless("partial_rotary_factor", 1.0)
        source = read_rope(fields, shape.head_dim, shape.max_positions)
        return LayerRopes.same(source, shape.num_layers)

    def head_dim(self, fields: Fields, default: int) -> int:
        return fields.integer("head_dim", default)

    def _shape(self, fields: Fields) -> ModelShape:
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        num_layers, inner = fields.layers("num_hidden_layers"), self.inner_size(fields)
        head_dim = self.head_dim(fields, hidden // heads)
        shape = ModelShape(
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            inner_size=inner,
            layer_parameters=hidden * (2 * (heads + kv_heads) * head_dim + 3 * inner),
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            attention=self.attention(fields, num_layers),
        )
        if heads % kv_heads:
            raise StartupError(
                f"config.json: num_key_value_heads={kv_heads} does not divide "
                f"num_attention_heads={heads}"
            )
        return self.sized(fields, shape)

    def inner_size(self, fields: Fields) -> int:
        """The width of the MLP."""
        return fields.integer("intermediate_size")

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        """The shape with what other layers than Llama's change in it."""
        return shape

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        root, traits = self.root_of(weights), self._traits
        projections = Projections(weights, shard, operators, root)
        tokens, head = embedding_and_head(
            projections, f"{root}.{self.token_name}.weight", is_tied=self._settings.tied
        )
        norm = None
        if shard.is_last:
            norm = self._norm(projections, f"{root}.{traits.names.norm}", traits.logit_scale)
        ropes = [source.rope(shard.shape.max_positions) for source in self._ropes.sources]
        return Decoder(
            blocks=tuple(self._layer(projections, layer) for layer in shard.span),
            tokens=tokens,
            ropes=tuple(rope.using(operators.constant) for rope in ropes),
            norm=norm,
            head=head,
            embedding_scale=traits.embedding_scale / traits.residual_scale,
            logit_cap=traits.logit_cap,
        )

    def root_of(self, weights: WeightSource) -> str:
        """The first of `roots` that the checkpoint has."""
        found = [each for each in self.roots if weights.has(f"{each}.{self.token_name}.weight")]
        return (*found, self.roots[0])[0]

    def _norm(self, projections: Projections, name: str, scale: float = 1.0) -> Norm:
        """A norm of the residual stream, its result multiplied by `scale`.

        With a `residual_scale` s the stream is kept divided by s: each layer then adds its result
        as it is, and an RMS norm, which ignores the scale of its input, gives the same with an
        epsilon divided by s².
        """
        weights, traits, eps = projections.weights, self._traits, self._settings.eps
        size = (projections.shard.shape.hidden_size,)
        weight = weights.tensor(TensorSlice(f"{name}.weight", size))
        if traits.norm_offset:
            weight = weight + traits.norm_offset
        if traits.has_layer_norm:
            bias = weights.tensor(TensorSlice(f"{name}.bias", size))
            return projections.operators.layer_norm(weight, bias, eps)
        if scale != 1.0:
            weight = weight * scale
        return projections.operators.rms_norm(weight, eps / traits.residual_scale**2)

    def _layer(self, projections: Projections, layer: int) -> Layer:
        return self._block(projections, layer)

    def _block(self, projections: Projections, layer: int) -> DecoderLayer:
        at, names = f"{projections.root}.layers.{layer}", self._traits.norms

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._norm(projections, f"{at}.{name}")

        return DecoderLayer(
            attention_norm=norm(names.attention),
            attention=self._attention(projections, at, layer),
            mlp_norm=norm(names.mlp),
            mlp=self._mlp(projections, f"{at}.{self._traits.names.mlp}"),
            attention_post_norm=norm(names.attention_post),
            mlp_post_norm=norm(names.mlp_post),
        )

    def _head_norms(
        self, projections: Projections, at: str, *, has_own_kv: bool = True
    ) -> HeadNorms:
        return head_norms(projections, at, self._traits, self._settings.eps, has_own_kv=has_own_kv)

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        shard, traits = projections.shard, self._traits
        at = f"{at}.{traits.names.attention}"
        dim = shard.shape.head_dim
        width, kv_width = shard.heads.times(dim), shard.kv_heads.times(dim)
        has_own_kv = self.shape.layer_attention[layer].kv_layer is None
        parts = [(f"{at}.q_proj", width)]
        if has_own_kv:
            value = self.value_projection(layer)
            parts += [(f"{at}.k_proj", kv_width), (f"{at}.{value}", kv_width)]
        runs = tuple(part for _, part in parts)
        fused = Fused(f"{at}.qkv_proj", runs) if traits.is_fused else parts
        norms = self._head_norms(projections, at, has_own_kv=has_own_kv)
        return AttentionBlock(
            shard.number_of(layer),
            len(shard.heads.run),
            len(shard.kv_heads.run),
            dim,
            projections.from_hidden(fused, has_bias=traits.qkv_bias),
            projections.to_hidden(f"{at}.{traits.names.out}", width, has_bias=traits.out_bias),
            q_norm=norms.q,
            k_norm=norms.k,
            rope=self._ropes.of_layer[layer],
            has_own_kv=has_own_kv,
            sinks=self._sinks(projections, at, layer),
        )

    def value_projection(self, layer: int) -> str:
        """The tensor that computes v."""
        return "v_proj"

    def _sinks(self, projections: Projections, at: str, layer: int) -> Tensor | None:
        """This rank's scores of `AttentionOptions.has_sinks`, in float32."""
        heads = projections.shard.heads
        if not self.shape.layer_attention[layer].has_sinks:
            return None
        part = TensorSlice(f"{at}.sinks", (heads.size,), rows=heads.run)
        return projections.weights.tensor(part).float()

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        inner, traits = projections.shard.inner, self._traits
        names = traits.names
        parts = {f"{at}.{names.gate}": inner, f"{at}.{names.up}": inner}
        is_fused = traits.is_fused or traits.has_fused_mlp
        fused = Fused(f"{at}.{names.gate_up}", (inner, inner)) if is_fused else parts
        return Mlp(
            up=projections.from_hidden(fused, has_bias=traits.mlp_bias),
            down=projections.to_hidden(f"{at}.{names.down}", inner, has_bias=traits.mlp_bias),
            activation=projections.operators.activation(self._settings.activation, is_gated=True),
        )
