"""Builds config.json, with its RoPE, from the metadata of a GGUF file. Unknown keys are rejected by
name.

The file stores numbers in 32 bits; each is read as the shortest decimal that rounds to it.
"""

from collections.abc import Mapping

import numpy as np
from gguf.constants import GGMLQuantizationType

from adapters.gguf.architectures import ARCHITECTURES, Architecture
from adapters.gguf.file import GgufFile, shortest_decimal

CHECKED = {"vocab_size"}
# Tensors that become part of config.json: divisors of the frequencies.
LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS})
# Numbers of `rope.scaling`, by their Hugging Face names.
SCALING_FIELDS = {
    "factor": "factor",
    "attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings",
}
SCALING_KEYS = {"rope.scaling.type", "rope.scaling.finetuned"} | {
    f"rope.scaling.{name}" for name in SCALING_FIELDS
}


def read_config(file: GgufFile) -> dict[str, object]:
    """The content of config.json. Raises `StartupError`."""
    name = file.text("general.architecture")
    architecture = ARCHITECTURES.get(name or "")
    if name == "clip":
        raise file.error(
            "this is an image encoder: name the model's file, and this one by --mmproj"
        )
    if name is None or architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise file.error(f"general.architecture {name!r} is not supported; known: {known}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("tensor token_embd.weight is missing")
    config: dict[str, object] = {
        "architectures": [architecture.family],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_fields(file, name, architecture),
    }
    if name == "gpt2":
        return config
    has_attention_bias = "blk.0.attn_output.bias" in file.tensors
    config["attention_bias"] = has_attention_bias
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    share = _rotated_share(file, name, architecture, config)
    config["rope_parameters"] = read_rope(file, name, config.pop("rope_theta", 10000.0))
    if share is not None:
        config["partial_rotary_factor"] = share
    if architecture.finish is not None:
        architecture.finish(file, config)
    return config


def _fields(file: GgufFile, name: str, architecture: Architecture) -> dict[str, object]:
    """The Hugging Face fields. Raises `StartupError` for unknown keys of the architecture."""
    fields: dict[str, object] = {}
    names = architecture.fields
    for key in file.keys:
        root, _, rest = key.partition(".")
        if root != name or rest in CHECKED | SCALING_KEYS | architecture.head_sizes.keys():
            continue
        if rest not in names:
            raise file.error(f"{key}={str(file.value(key))[:40]} is not supported")
        fields[names[rest]] = shortest_decimal(file.value(key))
    return fields


def _rotated_share(
    file: GgufFile, name: str, architecture: Architecture, config: Mapping[str, object]
) -> float | None:
    """The share of a head that RoPE rotates, None for all.

    Raises `StartupError` if a size that the family derives from others has another value.
    """
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None  # the model family rejects this
    for key, field in architecture.head_sizes.items():
        found = file.integer(f"{name}.{key}")
        head_dim = config.get(field, hidden // heads)
        if found in (None, head_dim) or (key.startswith("rope") and architecture.has_partial_rope):
            continue
        raise file.error(f"{name}.{key}={found} is not supported; only {head_dim} is")
    head_dim = config.get("head_dim", hidden // heads)
    rotated = file.integer(f"{name}.rope.dimension_count")
    if rotated is None or not architecture.has_partial_rope or not isinstance(head_dim, int):
        return None
    return rotated / head_dim


def read_rope(file: GgufFile, architecture: str, theta: object) -> dict[str, object]:
    """`rope_parameters`. Llama 3's and Phi-3's scalings are tensors of one divisor per frequency.

    Raises `StartupError` for another type of scaling.
    """
    rope: dict[str, object] = {"rope_theta": theta, "rope_type": "default"}
    kind = file.text(f"{architecture}.rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise file.error(
            f"{architecture}.rope.scaling.type={kind!r} is not supported; "
            "known: none, linear, yarn, longrope"
        )
    has_factors = LONG_FACTORS in file.tensors and SHORT_FACTORS in file.tensors
    if has_factors:
        rope["long_factor"] = _factors(file, LONG_FACTORS)
        rope["short_factor"] = _factors(file, SHORT_FACTORS)
        kind = "longrope"
    elif kind == "longrope":
        raise file.error(f"tensor {LONG_FACTORS} is missing")
    if kind != "none":
        rope |= {"rope_type": kind} | _numbers(file, architecture)
    if LLAMA3_FACTORS in file.tensors:
        if kind != "none":
            raise file.error(f"tensor {LLAMA3_FACTORS} is not supported with other scaling")
        rope |= {"rope_type": "factors", "factors": _factors(file, LLAMA3_FACTORS)}
    return rope


def _numbers(file: GgufFile, architecture: str) -> dict[str, object]:
    found = {
        name: shortest_decimal(file.value(f"{architecture}.rope.scaling.{key}"))
        for key, name in SCALING_FIELDS.items()
    }
    return {name: value for name, value in found.items() if value is not None}


def _factors(file: GgufFile, name: str) -> list[float]:
    entry = file.tensors[name]
    if entry.kind is not GGMLQuantizationType.F32:
        raise file.error(f"tensor {name} is {entry.kind.name}; only F32 is supported")
    found = np.frombuffer(
        file.parts[entry.part].data, np.float32, int(np.prod(entry.shape)), entry.start
    )
    return [float(each) for each in found]
