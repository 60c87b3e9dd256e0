"""Models with image encoders."""

from collections.abc import Mapping

from adapters.models.named_shapes.hybrid import qwen3_5
from adapters.models.named_shapes.llama_like import Config

QWEN_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def qwen3_5_vision(text: Config, depth: int, width: int, inner: int, heads: int) -> Config:
    """Qwen 3.5 with its encoder of images."""
    rope = {
        "rope_type": "default",
        "rope_theta": text["rope_theta"],
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": {
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_heads": heads,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 2304,
            "hidden_act": "gelu_pytorch_tanh",
        },
        **QWEN_TOKENS,
    }


VISION_SHAPES: Mapping[str, Config] = {
    "Qwen3.5-0.8B-vision": qwen3_5_vision(
        qwen3_5(24, 1024, 3584, heads=8, kv_heads=2, values=16), 12, 768, 3072, heads=12
    ),
}

# The tokens of images by the fields that have their ids.
IMAGE_TOKENS: Mapping[str, str] = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
