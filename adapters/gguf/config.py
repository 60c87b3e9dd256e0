"""Builds config.json from the metadata of a GGUF file. Unknown keys are rejected by name.

The file stores numbers in 32 bits; each is read as the shortest decimal that rounds to it.
"""

from collections.abc import Mapping

import numpy as np
from gguf.constants import GGMLQuantizationType

from adapters.gguf.file import GgufFile
from adapters.gguf.names import NAMES, ROPE_FACTORS

FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Metadata keys after the architecture's prefix, and the Hugging Face fields that they become.
ROTARY_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
LLAMA_FIELDS = {**ROTARY_FIELDS, "attention.sliding_window": "sliding_window"}
GPT2_FIELDS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
CHECKED = {"attention.value_length", "rope.dimension_count", "vocab_size"}
SCALING = {"rope.scaling.type", "rope.scaling.factor"}
NO_MEANING = {"rope.scaling.original_context_length", "rope.scaling.finetuned"}


def read_config(file: GgufFile) -> dict[str, object]:
    """The content of config.json. Raises `StartupError`."""
    architecture = file.text("general.architecture")
    if architecture not in NAMES:
        known = ", ".join(NAMES)
        raise file.error(f"general.architecture {architecture!r} is not supported; known: {known}")
    if (file.integer("split.count") or 1) > 1:
        raise file.error("split.count: a model in several files is not supported; merge them")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("tensor token_embd.weight is missing")
    config: dict[str, object] = {
        "architectures": [FAMILIES[architecture]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture == "gpt2":
        return config | _fields(file, architecture, GPT2_FIELDS)
    fields = LLAMA_FIELDS if architecture == "llama" else ROTARY_FIELDS
    config |= _fields(file, architecture, fields)
    config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    if "sliding_window" in config:
        config["architectures"] = ["MistralForCausalLM"]
    _check_sizes(file, architecture, config)
    config["rope_parameters"] = _rope(file, architecture, config.pop("rope_theta", 10000.0))
    return config


def _fields(file: GgufFile, architecture: str, names: Mapping[str, str]) -> dict[str, object]:
    """The Hugging Face fields. Raises `StartupError` for unknown keys of the architecture."""
    fields: dict[str, object] = {}
    for key in file.keys:
        root, _, rest = key.partition(".")
        if root != architecture or rest in CHECKED | SCALING | NO_MEANING:
            continue
        if rest not in names:
            raise file.error(f"{key}={str(file.value(key))[:40]} is not supported")
        fields[names[rest]] = shortest_decimal(file.value(key))
    return fields


def shortest_decimal(value: object) -> object:
    """A float32 as the shortest decimal that rounds to it; other values unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_sizes(file: GgufFile, architecture: str, config: Mapping[str, object]) -> None:
    """Check that the sizes which the families derive from others have the derived value."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return  # the model family rejects this
    head_dim = config.get("head_dim", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        found = file.integer(f"{architecture}.{name}")
        if found not in (None, head_dim):
            raise file.error(f"{architecture}.{name}={found} is not supported; only {head_dim} is")


def _rope(file: GgufFile, architecture: str, theta: object) -> dict[str, object]:
    """`rope_parameters`. Llama 3's scaling is stored as a tensor of divisors, one per frequency."""
    rope: dict[str, object] = {"rope_theta": theta, "rope_type": "default"}
    kind = file.text(f"{architecture}.rope.scaling.type") or "none"
    if kind == "linear":
        factor = shortest_decimal(file.value(f"{architecture}.rope.scaling.factor"))
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise file.error(
            f"{architecture}.rope.scaling.type={kind!r} is not supported; known: none, linear"
        )
    entry = file.tensors.get(ROPE_FACTORS)
    if entry is None:
        return rope
    if kind != "none" or entry.kind is not GGMLQuantizationType.F32:
        raise file.error(f"tensor {ROPE_FACTORS} is not supported with its type or other scaling")
    factors = np.frombuffer(file.data, np.float32, int(np.prod(entry.shape)), entry.start)
    return rope | {"rope_type": "factors", "factors": factors.tolist()}
