"""The sizes in a GGUF file's metadata, as llama.cpp's converter writes them for each family."""

from typing import Any

# Their keys are those of every Llama, or are listed with them.
FIXED = ("qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3vl", "falcon-h1", "nemotron_h")
PARTIAL = ("phi3", "stablelm")


def sizes_of(config: Any, architecture: str) -> dict[str, Any]:
    """The keys that say how large a model is, from its transformers config."""
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
    }
    if architecture == "gpt2":
        sizes["feed_forward_length"] = config.n_inner or 4 * config.hidden_size
        sizes["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        sizes |= {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
            **({} if architecture in PARTIAL else {"attention.key_length": head_dim}),
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            **_norm_and_rope(config, head_dim),
        }
        sizes |= {
            key: getattr(config, name)
            for key, name in OTHERS.items()
            if getattr(config, name, None) is not None and architecture not in FIXED
        }
    if architecture == "gemma4":
        sizes |= _of_gemma4(config)
    if architecture == "lfm2":
        sizes |= _of_lfm2(config)
    if architecture == "nemotron_h":
        sizes |= _of_nemotron_h(config)
    if architecture == "falcon-h1":
        sizes |= _of_mamba(config)
    if architecture == "granitehybrid":
        sizes |= _of_granite_hybrid(config)
    if architecture.startswith("qwen35"):
        sizes |= _of_qwen35(config)
    if getattr(config, "shared_expert_intermediate_size", None):
        sizes |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return {f"{architecture}.{name}": value for name, value in sizes.items()}


# Keys of families beyond Llama's, as llama.cpp's converter writes them, and their config fields.
OTHERS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "use_parallel_residual": "use_parallel_residual",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def _of_lfm2(config: Any) -> dict[str, Any]:
    """The keys of LFM2, with the width that its MLP has after `block_auto_adjust_ff_dim`."""
    heads = [config.num_key_value_heads * (each != "conv") for each in config.layer_types]
    inner, multiple = 2 * config.intermediate_size // 3, config.block_multiple_of
    return {
        "attention.head_count_kv": heads,
        "feed_forward_length": -(-inner // multiple) * multiple,
        "shortconv.l_cache": config.conv_L_cache,
    }


def _of_ssm(kernel: int, state: int, groups: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The keys of Mamba 2."""
    return {
        "ssm.conv_kernel": kernel,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * head_dim,
    }


def _of_mamba(config: Any) -> dict[str, Any]:
    return _of_ssm(
        config.mamba_d_conv,
        config.mamba_d_state,
        config.mamba_n_groups,
        config.mamba_n_heads,
        config.mamba_d_head,
    )


def _of_nemotron_h(config: Any) -> dict[str, Any]:
    """The keys of Nemotron-H, of which some have a number for each layer."""
    types, heads = config.layers_block_type, config.num_key_value_heads
    return _of_ssm(
        config.conv_kernel,
        config.ssm_state_size,
        config.n_groups,
        config.mamba_num_heads,
        config.mamba_head_dim,
    ) | {
        "attention.head_count_kv": [heads * (each == "full_attention") for each in types],
        "feed_forward_length": [config.intermediate_size * (each == "mlp") for each in types],
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
    }


def _of_granite_hybrid(config: Any) -> dict[str, Any]:
    """The keys of Granite 4 that are not equal to a field of each architecture."""
    heads = [config.num_key_value_heads * ("full" in each) for each in config.layer_types]
    return _of_mamba(config) | {
        "attention.head_count_kv": heads,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }


def _of_gemma4(config: Any) -> dict[str, Any]:
    """The keys of Gemma 4, whose layer types differ in head size and MLP."""
    own = config.num_hidden_layers - config.num_kv_shared_layers
    inner = config.intermediate_size
    wide = 2 * inner if config.use_double_wide_mlp else inner
    full = config.per_layer_config[config.layer_types.index("full_attention")].head_dim
    return {
        "attention.key_length": full,
        "attention.value_length": full,
        "rope.dimension_count": full,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.sliding_window_pattern": [
            each == "sliding_attention" for each in config.layer_types
        ],
        "feed_forward_length": [inner] * own + [wide] * config.num_kv_shared_layers,
        "attention.head_count_kv": [
            config.per_layer_config[each].num_key_value_heads
            for each in range(config.num_hidden_layers)
        ],
    } | (
        {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
        if config.enable_moe_block
        else {}
    )


def _of_qwen35(config: Any) -> dict[str, Any]:
    """The keys of Qwen 3.5 that are not equal to a field."""
    return {
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [each == "linear_attention" for each in config.layer_types],
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
    }


def _norm_and_rope(config: Any, head_dim: int) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4, "rope_type": "default"}
    full = rope.get("full_attention", rope)
    found: dict[str, Any] = {"rope.freq_base": float(full["rope_theta"])}
    if "partial_rotary_factor" in full:
        found["rope.dimension_count"] = int(head_dim * full["partial_rotary_factor"])
    if hasattr(config, "layer_norm_eps"):
        found["attention.layer_norm_epsilon"] = config.layer_norm_eps
    else:
        fields = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        eps = next(filter(None, (getattr(config, name, None) for name in fields)))
        found["attention.layer_norm_rms_epsilon"] = eps
    if full["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        }
    if full["rope_type"] == "longrope":
        found |= {
            "rope.scaling.attn_factor": full["attention_factor"],
            "rope.scaling.original_context_length": config.original_max_position_embeddings,
        }
    return found
