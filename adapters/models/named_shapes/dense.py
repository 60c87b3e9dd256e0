"""Dense models with attention in all layers. `TINY` and `M110` are for experiments."""

from collections.abc import Mapping
from functools import partial

from adapters.models.named_shapes.llama_like import Config, llama_like


def opt(layers: int, hidden: int, heads: int) -> Config:
    return {
        "architectures": ["OPTForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_attention_heads": heads,
        "activation_function": "relu",
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }


def llama3(factor: float) -> dict[str, object]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [min(1.118320672**number, 33.0) for number in range(48)],
}
GRANITE: Mapping[str, float] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}

llama = partial(llama_like, "LlamaForCausalLM")
qwen2 = partial(llama_like, "Qwen2ForCausalLM", eps=1e-6)
qwen3 = partial(llama_like, "Qwen3ForCausalLM", eps=1e-6)
mistral = partial(llama_like, "MistralForCausalLM")
smollm3 = partial(llama_like, "SmolLM3ForCausalLM", eps=1e-6)
glm4 = partial(llama_like, "Glm4ForCausalLM", attention_bias=True, partial_rotary_factor=0.5)
ernie = partial(llama_like, "Ernie4_5ForCausalLM")
phi3 = partial(llama_like, "Phi3ForCausalLM", original_max_position_embeddings=4096)
olmo2 = partial(llama_like, "Olmo2ForCausalLM", eps=1e-6)
granite = partial(llama_like, "GraniteForCausalLM")

# layers, hidden and inner size, heads, KV heads, vocabulary, positions, RoPE's theta
SHAPES: Mapping[str, Config] = {
    "Llama-3.1-8B": llama(32, 4096, 14336, 32, 8, 128256, 131072, 5e5, rope_scaling=llama3(8.0)),
    "Llama-3.2-1B": llama(
        16, 2048, 8192, 32, 8, 128256, 131072, 5e5, tied=True, rope_scaling=llama3(32.0)
    ),
    "Qwen2.5-0.5B": qwen2(24, 896, 4864, 14, 2, 151936, 32768, 1e6, tied=True),
    "Qwen2.5-1.5B": qwen2(28, 1536, 8960, 12, 2, 151936, 32768, 1e6, tied=True),
    "Qwen2.5-7B": qwen2(28, 3584, 18944, 28, 4, 152064, 32768, 1e6),
    "Qwen3-0.6B": qwen3(28, 1024, 3072, 16, 8, 151936, 40960, 1e6, tied=True, head_dim=128),
    "Qwen3-4B": qwen3(36, 2560, 9728, 32, 8, 151936, 40960, 1e6, tied=True, head_dim=128),
    "Mistral-7B": mistral(32, 4096, 14336, 32, 8, 32768, 32768, 1e6),
    "SmolLM3-3B": smollm3(36, 2048, 11008, 16, 4, 128256, 65536, 5e6, tied=True),
    "GLM-4-9B": glm4(40, 4096, 13696, 32, 2, 151552, 32768, 1e4, head_dim=128),
    "ERNIE-4.5-0.3B": ernie(18, 1024, 3072, 16, 2, 103424, 131072, 5e5, tied=True, head_dim=128),
    "Phi-4-mini": phi3(
        *(32, 3072, 8192, 24, 8, 200064, 131072, 1e4),
        tied=True,
        partial_rotary_factor=0.75,
        rope_scaling=LONGROPE,
    ),
    "OLMo-2-1B": olmo2(16, 2048, 8192, 16, 16, 100352, 4096, 5e5),
    "Granite-3.3-2B": granite(40, 2048, 8192, 32, 8, 49159, 131072, 1e7, tied=True, **GRANITE),
    "OPT-125M": opt(layers=12, hidden=768, heads=12),
    "OPT-1.3B": opt(layers=24, hidden=2048, heads=32),
    "GPT-2": GPT2,
    "M110": llama(12, 768, 2048, 12, 4, 32000, 4096, 1e4),
    "TINY": llama(2, 64, 128, 2, 1, 32000, 4096, 1e4),
}
