"""Gemma 3: Gemma 2 without soft caps, with norms of q and k, five windowed layers to each full one,
and another RoPE base in windowed layers (arXiv:2503.19786). Of multimodal checkpoints the text
model is served."""

import logging
from collections.abc import Mapping

from adapters.models.base.fields import Fields
from adapters.models.base.rope_fields import LayerRopes, ropes_by_type
from adapters.models.base.traits import FULL, SLIDING
from adapters.models.dense.gemma2 import Gemma2
from engine.errors import StartupError
from engine.worker.ports import ModelShape

logger = logging.getLogger(__name__)


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


class Gemma3Multimodal(Gemma3):
    """The text model of `Gemma3ForConditionalGeneration`; its vision tower is skipped."""

    ignored_weights = (*Gemma3.ignored_weights, "*vision_tower.*", "*multi_modal_projector.*")
    roots = ("model.language_model", "language_model.model")

    def text_config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise StartupError(f"config.json: text_config is {text!r}, expected an object")
        logger.warning("the vision tower of this checkpoint is not loaded; only text is served")
        return text
