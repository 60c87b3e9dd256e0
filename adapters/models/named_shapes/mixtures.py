"""Mixtures of experts."""

from collections.abc import Mapping

from adapters.models.named_shapes.llama_like import Config, llama_like

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

# layers, hidden and inner size, heads, KV heads, vocabulary, positions, RoPE's theta
SHAPES: Mapping[str, Config] = {
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
}
