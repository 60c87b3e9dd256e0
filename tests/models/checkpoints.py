"""Tiny random checkpoints in Hugging Face's own format, for tests of everything that loads one.

The weights are large enough that logits differ clearly between tokens, positions and heads.
"""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from tests.models.recurrent_variants import RECURRENT, SHARED_EXPERTS

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
SMALL_GPT2: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [],
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 11.0],
    "attention_factor": 1.1,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 7,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
}
# Served are 128 tokens: at most the original context, or more for any request.
FROM_128 = {"original_max_position_embeddings": 128}
FROM_1 = {"original_max_position_embeddings": 1}

GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "sliding_window": 7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}


MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
HUNYUAN: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "alpha": 50.0,
    },
}
MLA_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}

# Name of a variant: (transformers' config class, what it changes).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = RECURRENT | {
    "llama": ("LlamaConfig", {}),
    "llama_multi_head": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama_multi_query": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama_wide_heads": ("LlamaConfig", {"head_dim": 24}),
    "llama_gelu": ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_biases": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5}),
    "mixtral_window": ("MixtralConfig", {"num_experts_per_tok": 3, "sliding_window": 7}),
    "qwen2_moe": ("Qwen2MoeConfig", SHARED_EXPERTS),
    "qwen3_moe": ("Qwen3MoeConfig", QWEN3_MOE),
    "qwen3_moe_renormalized": ("Qwen3MoeConfig", QWEN3_MOE | {"norm_topk_prob": True}),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "relu"},
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "attention_bias": True,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 7}),
    "phi3_short": ("Phi3Config", {"rope_parameters": LONGROPE, **FROM_128}),
    "phi3_long": ("Phi3Config", {"rope_parameters": LONGROPE, **FROM_1}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "hidden_size": 64}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": YARN,
            },
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", GPT_OSS),
    "gpt_oss_clamped": ("GptOssConfig", GPT_OSS | {"swiglu_limit": 0.5}),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4_plain": (  # no embeddings per layer, and each layer has KV of its own
        "Gemma4TextConfig",
        GEMMA4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "gemma4_moe": (  # as 26B-A4B; in layers with full attention the values are the keys
        "Gemma4TextConfig",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "num_key_value_heads": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "use_double_wide_mlp": False,
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4Config", {"head_dim": 16, "attention_bias": True}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "cohere2": (
        "Cohere2Config",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4_window": ("Exaone4Config", {"sliding_window": 7, "sliding_window_pattern": 2}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_intermediate_size": 40, "moe_num_experts": 8, "moe_k": 3},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "dim_model_base": 16,
        },
    ),
    "minicpm": (  # as Granite, which transformers has; see `OTHER_CONFIG`
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 8**-0.5,
            "residual_multiplier": 1.4 / 3**0.5,
            "logits_scaling": 2.0,
        },
    ),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "arcee": ("ArceeConfig", {}),
    "hunyuan": ("HunYuanDenseV1Config", HUNYUAN),
    "hunyuan_moe": ("HunYuanMoEV1Config", HUNYUAN | {"num_experts": 8, "moe_topk": 3}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 7}),
    "starcoder2_full": ("Starcoder2Config", {"sliding_window": None}),
    "deepseek_v2": ("DeepseekV2Config", MLA | {"rope_parameters": MLA_YARN}),
    "deepseek_v3": (
        "DeepseekV3Config",
        MLA | {"q_lora_rank": 20, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2Config",
        MLA | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3_groups": (
        "DeepseekV3Config",
        MLA | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {name: value for name, value in MLA.items() if name != "first_k_dense_replace"}
        | {"q_lora_rank": 20, "mlp_layer_types": ["dense", "dense", "sparse"]},
    ),
    "gpt2": ("GPT2Config", {}),
    "gpt2_untied": ("GPT2Config", {"tie_word_embeddings": False, "n_inner": 40}),
}

# What config.json says of variants whose own family transformers lacks.
OTHER_CONFIG: dict[str, dict[str, Any]] = {
    "minicpm": {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 16,
    }
}


_WRITTEN = TemporaryDirectory()
atexit.register(_WRITTEN.cleanup)


def make_model(variant: str, seed: int = 0, scale: float = 0.2, **changes: Any) -> Any:
    """A transformers causal LM of a variant, every parameter random (norms and biases too).
    `scale` is that of matrices."""
    config_class, differences = VARIANTS[variant]
    small = SMALL_GPT2 if config_class == "GPT2Config" else SMALL
    config = getattr(transformers, config_class)(**(small | differences | changes))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.dim() == 1 and name.endswith("weight")
            of_matrix = scale if parameter.dim() > 1 else 0.2
            parameter.copy_(1 + 0.1 * noise if is_scale else of_matrix * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4, stored like a parameter
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            if name.endswith(("e_score_correction_bias", "expert_bias")):  # of GLM-4.5, LFM2
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def make_checkpoint(directory: Path, variant: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a variant's checkpoint into `directory` and return it.

    `changes` are config fields on top of the variant's; `max_shard_size` (a keyword of
    `save_pretrained`) splits the weights over several files.
    """
    if not changes:  # many tests have the same one
        return shutil.copytree(
            _unchanged(variant, seed), directory, copy_function=shutil.copy, dirs_exist_ok=True
        )
    shard_size = changes.pop("max_shard_size", "1GB")
    make_model(variant, seed, **changes).save_pretrained(directory, max_shard_size=shard_size)
    if variant in OTHER_CONFIG:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | OTHER_CONFIG[variant]))
    return directory


@cache
def _unchanged(variant: str, seed: int) -> Path:
    """A variant's checkpoint, written once in a process."""
    directory = Path(_WRITTEN.name) / f"{variant}-{seed}"
    return make_checkpoint(directory, variant, seed, max_shard_size="1GB")
