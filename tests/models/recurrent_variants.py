"""Variants of models with recurrent layers, for `checkpoints`."""

from typing import Any

SHARED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [],
}
QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LFM2: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "block_multiple_of": 16,
}
GRANITE_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
}
GRANITE_EXPERTS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "head_dim": 16,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.45,
    "ssm_multipliers": [0.6, 0.9, 1.1, 0.8, 1.2],
    "mlp_multipliers": [0.8, 0.4],
}

# As `checkpoints.VARIANTS`.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", QWEN3_5),
    "qwen3_5_grouped": (
        "Qwen3_5TextConfig",
        QWEN3_5 | {"linear_num_value_heads": 4, "linear_value_head_dim": 12},
    ),
    "qwen3_5_attention": (  # no recurrent layer, and heads whose gates fill no whole vector
        "Qwen3_5TextConfig",
        QWEN3_5
        | {
            "layer_types": ["full_attention"] * 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        QWEN3_5 | SHARED_EXPERTS | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        QWEN3_5
        | SHARED_EXPERTS
        | {
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 24,
        },
    ),
    "lfm2": ("Lfm2Config", LFM2),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        LFM2
        | {
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2_biases": ("Lfm2Config", LFM2 | {"conv_bias": True, "conv_L_cache": 4}),
    "granite_hybrid": ("GraniteMoeHybridConfig", GRANITE_HYBRID),
    "granite_hybrid_moe": ("GraniteMoeHybridConfig", GRANITE_HYBRID | GRANITE_EXPERTS),
    "granite_hybrid_groups": (
        "GraniteMoeHybridConfig",
        GRANITE_HYBRID
        | {
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": (
        "BambaConfig",
        {
            "num_hidden_layers": 5,
            "attn_layer_indices": [2, 4],
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "attention_bias": True,
        },
    ),
    "falcon_h1": ("FalconH1Config", FALCON_H1),
    "falcon_h1_norm": (
        "FalconH1Config",
        FALCON_H1
        | {
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M-M*-MM-*-M",
            "time_step_min": 1e-9,  # transformers raises time steps of prompts only
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "granite_hybrid_attention": (  # no recurrent layer, as Granite 4.0 Micro
        "GraniteMoeHybridConfig",
        GRANITE_HYBRID | {"layer_types": ["attention"] * 5, "position_embedding_type": "rope"},
    ),
}
