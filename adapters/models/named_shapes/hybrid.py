"""Models with recurrent layers."""

from collections.abc import Mapping

from adapters.models.named_shapes.llama_like import Config, llama_like


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


LFM2_TYPES = ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"]
LFM2_TYPES += ["full_attention", "conv"] * 4
GRANITE_ATTENTION = (10, 13, 17, 27)  # out of 32 layers


SHAPES: Mapping[str, Config] = {
    "Qwen3.5-0.8B": qwen3_5(24, 1024, 3584, heads=8, kv_heads=2, values=16),
    "Qwen3.5-2B": qwen3_5(24, 2048, 6144, heads=8, kv_heads=2, values=16),
    "LFM2-1.2B": llama_like(
        "Lfm2ForCausalLM",
        *(16, 2048, 12288, 32, 8, 65536, 128000, 1e6),
        tied=True,
        norm_eps=1e-5,
        conv_L_cache=3,
        layer_types=LFM2_TYPES,
    ),
    "Granite-4.0-H-350M": llama_like(
        "GraniteMoeHybridForCausalLM",
        *(32, 768, 2048, 12, 4, 100352, 32768, 1e4),
        tied=True,
        layer_types=["attention" if at in GRANITE_ATTENTION else "mamba" for at in range(32)],
        shared_intermediate_size=2048,
        num_local_experts=0,
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.246,
        logits_scaling=3.0,
    ),
    "Qwen3.5-4B": qwen3_5(32, 2560, 9216, heads=16, kv_heads=4, values=32),
}
