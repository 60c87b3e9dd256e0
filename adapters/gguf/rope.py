"""The RoPE of a GGUF file as Hugging Face's `rope_parameters`."""

import numpy as np
from gguf.constants import GGMLQuantizationType

from adapters.gguf.file import GgufFile, shortest_decimal

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
    found = np.frombuffer(file.data, np.float32, int(np.prod(entry.shape)), entry.start)
    return [float(each) for each in found]
