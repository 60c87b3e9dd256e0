"""Gemma 2: soft caps of scores and logits, norms before and after each block, and a sliding window
in every other layer (arXiv:2408.00118).

Gemma 3: Gemma 2 without soft caps, with norms of q and k, five windowed layers to each full one,
and another RoPE base in windowed layers (arXiv:2503.19786).
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, ropes_by_type
from adapters.models.base.rotary import RotaryFamily
from adapters.models.base.traits import (
    FOUR_NORMS,
    FULL,
    SLIDING,
    FamilyTraits,
    every_nth_full,
    layer_types,
    windowed,
)
from adapters.models.encoders.families import ReadsImages
from adapters.models.encoders.siglip import PooledPatches, Siglip, SiglipShape
from engine.errors import StartupError
from engine.worker.ports import AttentionOptions, ModelShape, Operators, TensorSlice, WeightSource

PROJECTION = "mm_input_projection_weight"
logger = logging.getLogger(__name__)


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


class Gemma3(Gemma2):
    """The text model (`Gemma3ForCausalLM`)."""

    defaults: Mapping[str, object] = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }
    period = 6
    qk_norm = "head"

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        thetas = {
            FULL: fields.number("rope_theta", 1000000.0),
            SLIDING: fields.number("rope_local_base_freq", 10000.0),
        }
        return ropes_by_type(fields, shape, self.layer_types(fields, shape.num_layers), thetas)


class Gemma3Multimodal(ReadsImages, Gemma3):
    """`Gemma3ForConditionalGeneration`: the text model, in which the tokens of an image attend to
    each other, and SigLIP."""

    ignored_weights = (*Gemma3.ignored_weights, "*vision_tower.*", "*multi_modal_projector.*")
    roots = ("model.language_model", "language_model.model", "model")  # the last in GGUF files
    encoder_roots = (
        "vision_tower.vision_model.",
        "model.vision_tower.vision_model.",
        "vision_tower.",
        "model.vision_tower.",
    )
    encoder_tensor = "post_layernorm.weight"

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self._vision = _vision_shape(Fields(config), self.shape.hidden_size)
        self.encoder = None if self._vision is None else self._vision.report
        if self._vision is None:
            logger.warning("config.json has no vision_config: only text is served")
            return
        options = [replace(each, sees_images=True) for each in self.shape.layer_attention]
        self.shape = replace(self.shape, attention=tuple(options))

    def build_encoder(self, weights: WeightSource, operators: Operators) -> Siglip:
        shape = self._vision
        assert shape is not None, "it has an encoder"
        names = [f"{each}multi_modal_projector." for each in ("", "model.")]
        at = next((each for each in names if weights.has(f"{each}{PROJECTION}")), names[0])
        norm = weights.tensor(TensorSlice(f"{at}mm_soft_emb_norm.weight", (shape.width,)))
        matrix = weights.tensor(TensorSlice(f"{at}{PROJECTION}", (shape.width, shape.out_width)))
        tokens = PooledPatches(
            operators.rms_norm(norm + 1.0, shape.eps),
            operators.linear([matrix.t().contiguous()], None),
        )
        return Siglip(weights, operators, shape, self.encoder_root(weights), tokens)


def _vision_shape(config: Fields, out_width: int) -> SiglipShape | None:
    """The sizes of the encoder, whose blocks of patches become `mm_tokens_per_image` tokens; None
    without one."""
    vision, num_tokens = config.child("vision_config"), config.integer("mm_tokens_per_image", 256)
    if vision is None:
        return None
    side = vision.integer("image_size") // vision.integer("patch_size")
    block = side // math.isqrt(num_tokens)
    if not block or block**2 * num_tokens != side**2:
        raise StartupError(
            f"{config.where}: mm_tokens_per_image={num_tokens} tokens are not made of squares of "
            f"the {side} × {side} patches of an image"
        )
    return SiglipShape.read(vision, block, out_width, is_whole=True)
