"""Mixtures of experts."""

from collections.abc import Mapping

from adapters.models.named_shapes.llama_like import Config, llama_like

SHAPES: Mapping[str, Config] = {
    "Qwen3-30B-A3B": llama_like(
        "Qwen3MoeForCausalLM",
        layers=48,
        hidden=2048,
        inner=6144,
        heads=32,
        kv_heads=4,
        vocab=151936,
        positions=40960,
        theta=1000000.0,
        head_dim=128,
        rms_norm_eps=1e-6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "OLMoE-1B-7B": llama_like(
        "OlmoeForCausalLM",
        layers=16,
        hidden=2048,
        inner=1024,
        heads=16,
        kv_heads=16,
        vocab=50304,
        positions=4096,
        theta=10000.0,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "gpt-oss-20b": llama_like(
        "GptOssForCausalLM",
        layers=24,
        hidden=2880,
        inner=2880,
        heads=64,
        kv_heads=8,
        vocab=201088,
        positions=131072,
        theta=150000.0,
        head_dim=64,
        attention_bias=True,
        sliding_window=128,
        num_local_experts=32,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
}
