"""Gemma 4, text: Gemma 3 with two kinds of heads. E2B and E4B have embeddings per layer, and last
layers that read the KV of earlier ones; in larger models the values of full attention are its keys,
and 26B-A4B has experts."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, ropes_by_type
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import (
    FOUR_NORMS,
    FULL,
    SLIDING,
    FamilyTraits,
    every_nth_full,
    layer_types,
)
from adapters.models.encoders.families import ReadsImages
from adapters.models.encoders.gemma4_vision import Gemma4Vision, Gemma4VisionShape
from adapters.models.mixtures.gemma4_experts import Gemma4Experts
from engine.errors import StartupError
from engine.worker.model.layer_inputs import LayerInput, LayerInputs, Padding, StageInputs
from engine.worker.model.layers import AttentionBlock, Decoder, DecoderLayer, FeedForward, Mixer
from engine.worker.ports import (
    AttentionOptions,
    ModelShape,
    Operators,
    Shard,
    TensorSlice,
    WeightSource,
)

logger = logging.getLogger(__name__)

PERIOD = 6
BOTH_WAYS = "use_bidirectional_attention"


class _KVSize(NamedTuple):
    """The KV heads of a layer, and their size."""

    heads: int
    dim: int


class Gemma4(RotaryFamily):
    """The text model."""

    activation_field = "hidden_activation"
    defaults: Mapping[str, object] = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262144,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
    }

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        fields = Fields({**self.defaults, **self.text_config(config)})
        self._keys_are_values = fields.flag("attention_k_eq_v", False)
        fields.reject_unless(BOTH_WAYS, False, "vision")
        self._input_width = fields.count("hidden_size_per_layer_input", 256)
        self._input_vocab = fields.integer("vocab_size_per_layer_input", self.shape.vocab_size)
        self._is_double_wide = fields.flag("use_double_wide_mlp", False)
        shared = [
            layer
            for layer, options in enumerate(self.shape.attention)
            if options.kv_layer is not None
        ]
        self.shape = replace(self.shape, layer_input_width=self._input_width)
        self.ignored_weights = (
            *type(self).ignored_weights,
            *(f"*.layers.{layer}.self_attn.[kv]_*" for layer in shared),
        )

    def traits(self, fields: Fields) -> FamilyTraits:
        has_bias = fields.flag("attention_bias", False)
        return FamilyTraits(
            qkv_bias=has_bias,
            out_bias=has_bias,
            qk_norm="head",
            norms=FOUR_NORMS,
            embedding_scale=self.shape.hidden_size**0.5,
            logit_cap=fields.optional_number("final_logit_softcapping"),
        )

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        types, sizes = self._types(fields, num_layers), self._kv_sizes(fields, num_layers)
        window = fields.integer("sliding_window")
        num_own = num_layers - fields.count("num_kv_shared_layers", 0)
        last = {kind: layer for layer, kind in enumerate(types[:num_own])}
        if not set(types) <= last.keys():
            raise StartupError(
                f"{fields.where}: num_kv_shared_layers leaves no layer of some type with KV"
            )
        return tuple(
            AttentionOptions(
                window=window if kind == SLIDING else None,
                scale=1.0,
                head_dim=sizes[kind].dim,
                num_kv_heads=sizes[kind].heads,
                kv_layer=None if layer < num_own else last[kind],
            )
            for layer, kind in enumerate(types)
        )

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        """The shape with room for the layers' widest KV, and with experts."""
        kinds = {_KVSize(each.num_kv_heads or 0, each.head_dim or 0) for each in shape.attention}
        for kind in kinds:
            if shape.num_heads % kind.heads:
                raise StartupError(
                    f"{fields.where}: num_key_value_heads={kind.heads} of some layers does not "
                    f"divide num_attention_heads={shape.num_heads}"
                )
        widest = max(kind.heads * kind.dim for kind in kinds)
        shape = replace(shape, head_dim=-(-widest // shape.num_kv_heads))
        self._experts = Gemma4Experts.of(fields)
        return shape if self._experts is None else self._experts.sized(shape)

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        types = self._types(fields, shape.num_layers)
        thetas = {FULL: 1000000.0, SLIDING: 10000.0}
        sizes = self._kv_sizes(fields, shape.num_layers)
        dims = {kind: size.dim for kind, size in sizes.items()}
        return ropes_by_type(fields, shape, types, thetas, dims)

    def _types(self, fields: Fields, num_layers: int) -> tuple[str, ...]:
        return layer_types(fields, num_layers, every_nth_full(num_layers, PERIOD))

    def _kv_sizes(self, fields: Fields, num_layers: int) -> dict[str, _KVSize]:
        """The heads of each layer type: `global_head_dim` and `num_global_key_value_heads`, or
        newer configs' options of each layer."""
        types = self._types(fields, num_layers)
        own = _KVSize(fields.integer("num_key_value_heads"), fields.integer("head_dim"))
        per_layer = fields.child("per_layer_config")
        if per_layer is None:
            heads = own.heads
            if fields.flag("attention_k_eq_v", False):
                heads = fields.integer("num_global_key_value_heads", heads)
            return {SLIDING: own, FULL: _KVSize(heads, fields.integer("global_head_dim"))}
        sizes: dict[str, set[_KVSize]] = {SLIDING: set(), FULL: set()}
        for layer, kind in enumerate(types):
            options = per_layer.child(str(layer)) or Fields({}, per_layer.where)
            heads = options.integer("num_key_value_heads", own.heads)
            sizes[kind].add(_KVSize(heads, options.integer("head_dim", own.dim)))
        if any(len(found) > 1 for found in sizes.values()):
            raise StartupError(f"{per_layer.where}: layers of a type have different heads")
        return {kind: next(iter(found), own) for kind, found in sizes.items()}

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        decoder = super().build(weights, shard, operators)
        if not self._input_width:
            return decoder
        source = self._layer_inputs(weights, operators) if shard.is_first else None
        width, hidden = self._input_width, self.shape.hidden_size
        return replace(decoder, inputs=StageInputs(hidden, width, len(shard.span), source))

    def _layer_inputs(self, weights: WeightSource, operators: Operators) -> LayerInputs:
        root, width, hidden = self.root_of(weights), self._input_width, self.shape.hidden_size
        size = self.shape.num_layers * width
        projection = TensorSlice(f"{root}.per_layer_model_projection.weight", (size, hidden))
        norm = weights.tensor(TensorSlice(f"{root}.per_layer_projection_norm.weight", (width,)))
        return LayerInputs(
            rows=weights.lookup(
                TensorSlice(f"{root}.embed_tokens_per_layer.weight", (self._input_vocab, size))
            ),
            scale=width**0.5,
            projection=operators.linear([weights.weight(projection)], None),
            # the projection is divided by sqrt(hidden), which its norm ignores but for epsilon
            norm=operators.rms_norm(norm, self._settings.eps * hidden),
            width=width,
            result_scale=2**-0.5,
        )

    def _block(self, projections: Projections, layer: int) -> DecoderLayer:
        block, at = super()._block(projections, layer), f"{projections.root}.layers.{layer}"
        scalar = projections.weights.tensor(TensorSlice(f"{at}.layer_scalar", (1,)))
        scale = projections.operators.scale(float(scalar[0]))
        if self._experts is not None:
            block = self._experts.beside(
                block,
                projections,
                at,
                lambda name: self._norm(projections, f"{at}.{name}"),
                self._settings.eps,
                projections.operators.activation(self._settings.activation, is_gated=True),
            )
        if not self._input_width:
            return replace(block, scale=scale)
        operators, size = projections.operators, (self._input_width, self.shape.hidden_size)
        gate, projection = (
            projections.weights.weight(TensorSlice(f"{at}.{name}.weight", shape))
            for name, shape in (
                ("per_layer_input_gate", size),
                ("per_layer_projection", size[::-1]),
            )
        )
        own = LayerInput(
            layer=layer - projections.shard.span.start,
            gate=operators.linear([gate], None),
            activation=operators.gate(self._settings.activation),
            projection=operators.linear([projection], None),
            norm=self._norm(projections, f"{at}.post_per_layer_input_norm"),
        )
        return replace(block, input=own, scale=scale)

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        options = self.shape.attention[layer]
        shape = replace(
            projections.shard.shape,
            head_dim=options.head_dim or 0,
            num_kv_heads=options.num_kv_heads or 0,
        )
        own = replace(projections, shard=replace(projections.shard, shape=shape))
        block = super()._attention(own, at, layer)
        if options.kv_layer is not None or not isinstance(block, AttentionBlock):
            return block
        part = TensorSlice(f"{at}.self_attn.q_norm.weight", (shape.head_dim,))
        ones = torch.ones_like(projections.weights.tensor(part))  # v's norm has no weight
        return replace(block, v_norm=projections.operators.rms_norm(ones, self._settings.eps))

    def value_projection(self, layer: int) -> str:
        is_full = self.shape.attention[layer].window is None
        return "k_proj" if self._keys_are_values and is_full else "v_proj"

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        layer = int(at.rpartition(".layers.")[2].partition(".")[0])
        if not self._is_double_wide or self.shape.attention[layer].kv_layer is None:
            return super()._mlp(projections, at)
        shape = replace(projections.shard.shape, inner_size=2 * self.shape.inner_size)
        wide = replace(projections, shard=replace(projections.shard, shape=shape))
        return super()._mlp(wide, at)


class Gemma4Multimodal(ReadsImages, Gemma4):
    """`Gemma4ForConditionalGeneration`: the text model and its image encoder; others are skipped.

    In larger models the tokens of an image attend to each other in layers with windows.
    """

    ignored_weights = (
        *Gemma4.ignored_weights,
        *("*vision_tower.*", "*audio_tower.*", "*embed_vision.*", "*embed_audio.*"),
    )
    roots = ("model.language_model", "language_model.model")
    encoder_roots = ("model.vision_tower.", "vision_tower.")
    encoder_tensor = "patch_embedder.input_proj.weight"

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        fields, text = Fields(config), Fields(self.text_config(config))
        vision, is_whole = fields.child("vision_config"), text.get(BOTH_WAYS) == "vision"
        self._vision, self.encoder = None, None
        if vision is None:
            logger.warning("config.json has no vision_config: only text is served")
            return
        self._image_id = fields.integer("image_token_id", 258880)
        self._pad_id = text.count("pad_token_id", 0)
        self._vision = Gemma4VisionShape.read(vision, self.shape.hidden_size, is_whole=is_whole)
        self.encoder = self._vision.report
        options = [
            replace(each, sees_images=is_whole and each.window is not None)
            for each in self.shape.layer_attention
        ]
        self.shape = replace(self.shape, attention=tuple(options))

    def build_encoder(self, weights: WeightSource, operators: Operators) -> Gemma4Vision:
        assert self._vision is not None, "it has an encoder"
        names = [f"{each}embed_vision.embedding_projection.weight" for each in ("model.", "")]
        projection = next((each for each in names if weights.has(each)), names[0])
        root = self.encoder_root(weights)
        return Gemma4Vision(weights, operators, self._vision, root, projection)

    def _layer_inputs(self, weights: WeightSource, operators: Operators) -> LayerInputs:
        inputs = super()._layer_inputs(weights, operators)
        if self._vision is None:
            return inputs
        return replace(inputs, padding=Padding(self._image_id, self._pad_id))
