"""The config.json fields of Llama-like models."""

from collections.abc import Mapping

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
