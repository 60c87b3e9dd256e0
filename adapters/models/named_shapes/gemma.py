"""Gemma 2, 3 and 4 (text)."""

from collections.abc import Mapping

from adapters.models.named_shapes.llama_like import Config, llama_like

FULL, SLIDING = "full_attention", "sliding_attention"


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


def gemma4(
    *, layers: int, hidden: int, inner: int, kv_heads: int, period: int, shared: int
) -> Config:
    """A text-only Gemma 4 with embeddings per layer; each `period`th layer has full attention, and
    the last `shared` ones have no KV of their own."""
    return llama_like(
        "Gemma4ForCausalLM",
        *(layers, hidden, inner, 8, kv_heads, 262144, 131072, 1e6),
        tied=True,
        eps=1e-6,
        head_dim=256,
        global_head_dim=512,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=512,
        layer_types=[FULL if each % period == 0 else SLIDING for each in range(1, layers + 1)],
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=shared,
        final_logit_softcapping=30.0,
        rope_parameters={
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    )


SHAPES: Mapping[str, Config] = {
    "Gemma-2-2B": llama_like(
        "Gemma2ForCausalLM",
        *(26, 2304, 9216, 8, 4, 256000, 8192, 1e4),
        tied=True,
        eps=1e-6,
        head_dim=256,
        sliding_window=4096,
    ),
    "Gemma-3-270M": gemma3(layers=18, hidden=640, inner=2048),
    "Gemma-3-1B": gemma3(layers=26, hidden=1152, inner=6912),
    "Gemma-4-E2B": {
        **gemma4(layers=35, hidden=1536, inner=6144, kv_heads=1, period=5, shared=20),
        "use_double_wide_mlp": True,
    },
    "Gemma-4-E4B": gemma4(layers=42, hidden=2560, inner=10240, kv_heads=2, period=6, shared=18),
}
