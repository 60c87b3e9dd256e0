"""The config.json fields of Llama-like models."""

from collections.abc import Mapping

Config = Mapping[str, object]


def llama_like(
    architecture: str,
    *,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    theta: float,
    tied: bool = False,
    **more: object,
) -> Config:
    """`more` are fields beyond Llama's, or with other values."""
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        **more,
    }
