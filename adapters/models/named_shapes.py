"""The config.json fields of well-known models, for checkpoints with random weights: those that read
text (`TINY` and `M110` are for experiments), and those that read images, too."""

from collections.abc import Mapping
from functools import partial

Config = Mapping[str, object]

NUMBERS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
)
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def llama_like(
    architecture: str, *numbers: float, tied: bool = False, eps: float = 1e-5, **more: object
) -> Config:
    """`numbers` are the values of `NUMBERS`; `more` are fields beyond Llama's, or other values."""
    return {
        "architectures": [architecture],
        **dict(zip(NUMBERS, numbers, strict=True)),
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
        **more,
    }


def llama3(factor: float) -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


llama = partial(llama_like, "LlamaForCausalLM")
qwen2 = partial(llama_like, "Qwen2ForCausalLM", eps=1e-6)
qwen3 = partial(llama_like, "Qwen3ForCausalLM", eps=1e-6)
mistral = partial(llama_like, "MistralForCausalLM")


def gemma3(layers: int, hidden: int, inner: int) -> Config:
    """A text-only Gemma 3: one KV head of 256, five windowed layers to each full one."""
    return llama_like(
        "Gemma3ForCausalLM",
        *(layers, hidden, inner, 4, 1, 262144, 32768, 1e6),
        tied=True,
        eps=1e-6,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_local_base_freq=10000.0,
    )


def qwen3_5(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, values: int) -> Config:
    """A dense Qwen 3.5 without its vision tower: `values` value heads in each Gated DeltaNet."""
    return llama_like(
        "Qwen3_5ForCausalLM",
        *(layers, hidden, inner, heads, kv_heads, 248320, 262144, 1e7),
        tied=True,
        eps=1e-6,
        head_dim=256,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=values,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )


# layers, hidden and inner size, heads, KV heads, vocabulary, positions, RoPE's theta
SHAPES: Mapping[str, Config] = {
    "Llama-3.1-8B": llama(32, 4096, 14336, 32, 8, 128256, 131072, 5e5, rope_scaling=llama3(8.0)),
    "Qwen2.5-0.5B": qwen2(24, 896, 4864, 14, 2, 151936, 32768, 1e6, tied=True),
    "Qwen2.5-7B": qwen2(28, 3584, 18944, 28, 4, 152064, 32768, 1e6),
    "Qwen3-4B": qwen3(36, 2560, 9728, 32, 8, 151936, 40960, 1e6, tied=True, head_dim=128),
    "Mistral-7B": mistral(32, 4096, 14336, 32, 8, 32768, 32768, 1e6),
    "M110": llama(12, 768, 2048, 12, 4, 32000, 4096, 1e4),
    "TINY": llama(2, 64, 128, 2, 1, 32000, 4096, 1e4),
    "Gemma-3-270M": gemma3(layers=18, hidden=640, inner=2048),
    "Gemma-3-1B": gemma3(layers=26, hidden=1152, inner=6912),
    "Qwen3.5-0.8B": qwen3_5(24, 1024, 3584, heads=8, kv_heads=2, values=16),
    "Qwen3.5-4B": qwen3_5(32, 2560, 9216, heads=16, kv_heads=4, values=32),
    "Qwen3-30B-A3B": llama_like(
        "Qwen3MoeForCausalLM",
        *(48, 2048, 6144, 32, 4, 151936, 40960, 1e6),
        eps=1e-6,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "OLMoE-1B-7B": llama_like(
        "OlmoeForCausalLM",
        *(16, 2048, 1024, 16, 16, 50304, 4096, 1e4),
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "gpt-oss-20b": llama_like(
        "GptOssForCausalLM",
        *(24, 2880, 2880, 64, 8, 201088, 131072, 1.5e5),
        head_dim=64,
        attention_bias=True,
        sliding_window=128,
        num_local_experts=32,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        rope_scaling=YARN,
    ),
    "DeepSeek-V2-Lite": llama_like(
        "DeepseekV2ForCausalLM",
        *(27, 2048, 10944, 16, 16, 102400, 163840, 1e4),
        eps=1e-6,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        rope_scaling=YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
}


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
