"""Models with image encoders."""

from collections.abc import Mapping

from adapters.models.named_shapes.text import Config, llama_like, qwen3_5

# The field of a shape that is not of the model: the text that stands for an image in the chat
# template, its special tokens with their ids, and the image processor's settings.
IMAGES = "random_images"
QWEN_NAMES = {
    "<|vision_start|>": 248053,
    "<|vision_end|>": 248054,
    "<|image_pad|>": 248056,
    "<|video_pad|>": 248057,
}
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
        IMAGES: {"text": "<|vision_start|><|image_pad|><|vision_end|>", "tokens": QWEN_NAMES},
    }


def smolvlm2(text: Config, depth: int, width: int, inner: int, heads: int) -> Config:
    """SmolVLM2: SigLIP over tiles of 512 × 512 pixels, of which 64 tokens are made."""
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    names = ["<global-img>", *places, "<fake_token_around_image>", "<image>"]
    tokens = {name: token_id for token_id, name in enumerate(names, 49152)}
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": tokens["<image>"],
        "scale_factor": 4,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {
            "num_hidden_layers": depth,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "image_size": 512,
            "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
        },
        IMAGES: {
            "text": "<image>",
            "tokens": tokens,
            "preprocessor": {
                "image_processor_type": "SmolVLMImageProcessor",
                "size": {"longest_edge": 2048},
                "max_image_size": {"longest_edge": 512},
            },
        },
    }


VISION_SHAPES: Mapping[str, Config] = {
    "Qwen3.5-0.8B-vision": qwen3_5_vision(
        qwen3_5(24, 1024, 3584, heads=8, kv_heads=2, values=16), 12, 768, 3072, heads=12
    ),
    "SmolVLM2-256M": smolvlm2(
        llama_like("LlamaForCausalLM", 30, 576, 1536, 9, 3, 49280, 8192, 1e5),
        *(12, 768, 3072, 12),
    ),
}
