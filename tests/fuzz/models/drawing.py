"""Draws a configuration: a variant of `tests.models.checkpoints` with other sizes and options."""

from random import Random
from typing import Any, NamedTuple

from tests.models.checkpoints import LLAMA3_ROPE, VARIANTS, YARN

MAX_WIDTH = 320  # of all heads together, and of the hidden states
HEAD_DIMS = (4, 6, 8, 12, 16, 20, 24, 32, 40, 64, 80)
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
    LLAMA3_ROPE,
    LLAMA3_ROPE | {"factor": 2.0, "original_max_position_embeddings": 64},
    YARN,
    YARN | {"factor": 40.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    YARN | {"attention_factor": 1.3},
)
ROPE_FAMILIES = ("LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "GraniteConfig")
LONGROPE_LISTS = ("short_factor", "long_factor")


class Drawn(NamedTuple):
    """A variant, and the fields of its configuration that are drawn."""

    variant: str
    changes: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(self.changes["vocab_size"])


def draw(random: Random) -> Drawn:
    """A configuration, which transformers may not accept, or Podway may refuse by name."""
    variant = random.choice(sorted(VARIANTS))
    config_class, base = VARIANTS[variant]
    changes: dict[str, Any] = {
        "vocab_size": random.choice([97, 101, 128, 257]),
        "tie_word_embeddings": random.random() < 0.5,
    }
    if config_class == "GPT2Config":
        return Drawn(variant, changes | _draw_gpt2(random))
    if "vocab_size_per_layer_input" in base:
        changes["vocab_size_per_layer_input"] = changes["vocab_size"]
    changes["intermediate_size"] = random.choice([24, 37, 48, 64, 96, 131])
    if config_class == "GptOssConfig":
        changes["intermediate_size"] = random.choice([32, 40, 64])
    if "kv_lora_rank" in base:
        changes |= _draw_latent(random)
    elif not variant.startswith("gemma4"):  # whose layers share heads and KV
        changes |= _draw_heads(random, base, has_own_dim="head_dim" in base)
    changes |= _draw_layers(random, base)
    changes |= _draw_options(random, config_class, base)
    if "mamba_n_heads" in base:
        width = base.get("mamba_d_ssm") or 2 * changes["hidden_size"]
        changes |= _draw_mamba(random, width)
    return Drawn(variant, changes)


def _draw_gpt2(random: Random) -> dict[str, Any]:
    heads = random.choice([1, 2, 3, 5])
    return {
        "n_head": heads,
        "n_embd": heads * random.choice([4, 8, 12, 20, 32]),
        "n_layer": random.randint(1, 4),
        "n_inner": random.choice([None, 37, 100]),
        "activation_function": random.choice(["gelu_new", "relu", "gelu"]),
    }


def _draw_heads(random: Random, base: dict[str, Any], *, has_own_dim: bool) -> dict[str, Any]:
    """The heads and their size; the hidden states are as wide as them, if it is no field."""
    while True:
        num_kv = random.choice([1, 1, 2, 3, 5])
        heads, dim = num_kv * random.choice([1, 2, 3, 4, 7]), random.choice(HEAD_DIMS)
        if heads * dim <= MAX_WIDTH:
            break
    sizes = {"num_attention_heads": heads, "num_key_value_heads": num_kv}
    if has_own_dim:
        return sizes | {"head_dim": dim, "hidden_size": random.choice([36, 60, 96, 130, 256])}
    rope = base.get("rope_parameters", {})
    if "short_factor" in rope:
        dim = random.choice([8, 16, 32])
        count = int(dim * rope["partial_rotary_factor"]) // 2
        lists = {name: [1 + 4 * random.random() for _ in range(count)] for name in LONGROPE_LISTS}
        sizes["rope_parameters"] = rope | lists
    width = heads * dim
    if "word_embed_proj_dim" in base:
        sizes |= {"word_embed_proj_dim": width, "ffn_dim": random.choice([24, 48, 50])}
    return sizes | {"hidden_size": width}


def _draw_latent(random: Random) -> dict[str, Any]:
    """The sizes of MLA."""
    heads = random.choice([1, 2, 3, 4, 8, 12])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": random.choice([48, 96, 120]),
        "q_lora_rank": random.choice([7, 20, 33]),
        "kv_lora_rank": random.choice([4, 7, 16, 24, 33, 64]),
        "qk_nope_head_dim": random.choice([2, 8, 12, 16, 20, 24, 33, 40]),
        "qk_rope_head_dim": random.choice([2, 4, 6, 8, 16, 32]),
        "v_head_dim": random.choice([1, 4, 8, 12, 20, 24, 36]),
    }


def _draw_layers(random: Random, base: dict[str, Any]) -> dict[str, Any]:
    """The number of layers, and their kinds in a new order."""
    kinds = list(base.get("layer_types", ()))
    if not kinds and "mlp_layer_types" not in base:
        return {"num_hidden_layers": random.randint(1, 5)}
    if not kinds or "num_kv_shared_layers" in base:
        return {}
    random.shuffle(kinds)
    return {"num_hidden_layers": len(kinds), "layer_types": kinds}


def _draw_mamba(random: Random, width: int) -> dict[str, Any]:
    """The heads of Mamba 2, together so wide, and their groups."""
    heads = random.choice([each for each in (1, 2, 3, 4, 6, 8) if width % each == 0])
    return {
        "mamba_n_heads": heads,
        "mamba_n_groups": random.choice([each for each in (1, 2, 3, 4) if heads % each == 0]),
        "mamba_d_state": random.choice([4, 8, 16, 40]),
        "mamba_d_conv": random.choice([2, 3, 4]),
        "mamba_conv_bias": random.random() < 0.5,
    }


def _draw_options(random: Random, config_class: str, base: dict[str, Any]) -> dict[str, Any]:
    """Windows, experts, biases, positions and recurrent layers, where the variant has them."""
    options: dict[str, Any] = {}
    if base.get("sliding_window") is not None:
        options["sliding_window"] = random.choice([1, 2, 5, 16, 17, 40])
    for name in ("num_experts", "num_local_experts"):
        if name in base:
            options[name] = random.choice([2, 3, 6, 17])
            options["num_experts_per_tok"] = random.randint(1, min(4, options[name]))
    if "moe_intermediate_size" in base:
        options["moe_intermediate_size"] = random.choice([20, 33, 40])
    if config_class in ROPE_FAMILIES and "rope_parameters" not in base:
        options["rope_parameters"] = random.choice(ROPES)
    if config_class == "LlamaConfig":
        options |= {name: random.random() < 0.4 for name in ("attention_bias", "mlp_bias")}
        options["hidden_act"] = random.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh"])
    if "linear_num_key_heads" in base:
        num_keys = random.choice([1, 2, 3])
        options |= {
            "linear_num_key_heads": num_keys,
            "linear_num_value_heads": num_keys * random.choice([1, 2, 3]),
            "linear_key_head_dim": random.choice([8, 16, 32]),
            "linear_value_head_dim": random.choice([8, 12, 16, 32]),
            "linear_conv_kernel_dim": random.choice([2, 4]),
        }
    return options
