"""Writes a GGUF file of a named shape with random weights, for servers that read such files.

    python -m examples.benchmarks.peers.random_gguf SHAPE FORMAT PATH

FORMAT is q3_k_s, iq4_xs, q4_0, q4_k_m, q8_0, bf16 or mxfp4; its types of tensors are those that
llama-quantize chooses, in mxfp4 those of gpt-oss: its experts in 4 bits, all else in 8. One tensor
is in memory at a time. The vocabulary has bytes, and pairs and triples of letters and digits. RoPE
is not scaled.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from adapters.models.named_shapes import IMAGES, SHAPES, VISION_SHAPES
from adapters.tokenizers.byte_level import byte_alphabet
from examples.benchmarks.peers.random_blocks import random_rows

Config = Mapping[str, Any]
ARCHITECTURES = {  # llama.cpp's name, and its name of the pre-tokenization
    "LlamaForCausalLM": ("llama", "llama-bpe"),
    "Qwen3ForCausalLM": ("qwen3", "qwen2"),
    "Qwen3MoeForCausalLM": ("qwen3moe", "qwen2"),
    "Qwen3_5ForCausalLM": ("qwen35", "qwen35"),
    "GptOssForCausalLM": ("gpt-oss", "gpt-4o"),
}
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "rope.freq_base": "rope_theta",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
FORMATS = {
    "q3_k_s": Kind.Q3_K,
    "iq4_xs": Kind.IQ4_XS,
    "q4_0": Kind.Q4_0,
    "q4_k_m": Kind.Q4_K,
    "q8_0": Kind.Q8_0,
    "bf16": Kind.BF16,
    "mxfp4": Kind.MXFP4,
}
SPECIAL = ("<|start|>", "<|end|>")
IMAGE_CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ 'IMAGE' if p.type == 'image' else p.text }}{% endfor %}"
    "{% endif %}\n{% endfor %}"
)


class Matrix(NamedTuple):
    """A tensor of random weights, `[rows, columns]` or `[experts, rows, columns]`."""

    name: str
    rows: int
    columns: int
    experts: int = 0


class Vector(NamedTuple):
    """A float32 tensor of one value."""

    name: str
    shape: tuple[int, ...]
    value: float = 1.0


Tensor = Matrix | Vector


def write(shape: str, format: str, path: Path, seed: int = 0) -> None:
    """Write the file; of a shape that reads images, its decoder."""
    whole = {**SHAPES, **VISION_SHAPES}[shape]
    config: Config = whole.get("text_config", whole)  # type: ignore[assignment]
    images: Config = whole.get(IMAGES, {})  # type: ignore[assignment]
    architecture, pre = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(config, architecture).items():
        add_value(writer, key, value)
    _add_vocabulary(writer, int(config["vocab_size"]), pre, images.get("tokens", {}))
    if images:
        writer.add_chat_template(IMAGE_CHAT.replace("IMAGE", images["text"]))
    rng = np.random.default_rng(seed)
    found = [(each, kind_of(each, config, format)) for each in tensors(config)]
    for each, kind in found:
        _announce(writer, each, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each, kind in found:
        if isinstance(each, Matrix):
            rows = max(1, each.experts) * each.rows
            writer.write_tensor_data(random_rows(rng, kind, rows, each.columns))
        else:
            writer.write_tensor_data(np.full(each.shape, each.value, np.float32))
    writer.close()


def metadata(config: Config, architecture: str) -> dict[str, Any]:
    head = _head_dim(config)
    config = {**config, **_expert_sizes(config)}
    sizes = {key: config[name] for key, name in KEYS.items() if name in config}
    sizes |= {"attention.key_length": head, "attention.value_length": head}
    sizes["rope.dimension_count"] = int(head * config.get("partial_rotary_factor", 1))
    if "linear_num_value_heads" in config:
        inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        sizes |= {"ssm.inner_size": inner, "rope.dimension_sections": [11, 11, 10, 0]}
    return {f"{architecture}.{name}": value for name, value in sizes.items()}


def _expert_sizes(config: Config) -> Config:
    """Those of gpt-oss by the names that others have for them."""
    if "num_local_experts" not in config:
        return {}
    inner = config["intermediate_size"]
    return {"num_experts": config["num_local_experts"], "moe_intermediate_size": inner}


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def tensors(config: Config) -> Iterator[Tensor]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield Matrix("token_embd", vocabulary, hidden)
    yield Vector("output_norm", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Matrix("output", vocabulary, hidden)
    interval = config.get("full_attention_interval", 1)
    has_gate, is_oss = interval > 1, "num_local_experts" in config
    norm = "post_attention" if has_gate or is_oss else "ffn"
    for layer in range(config["num_hidden_layers"]):
        root, inner = f"blk.{layer}", config["intermediate_size"]
        yield Vector(f"{root}.attn_norm", (hidden,))
        yield Vector(f"{root}.{norm}_norm", (hidden,))
        if (layer + 1) % interval:
            yield from _delta_net(root, config)
        else:
            yield from _attention(root, config, has_gate=has_gate)
        if is_oss or "num_experts" in config:
            yield from _experts(root, {**config, **_expert_sizes(config)}, has_bias=is_oss)
            continue
        yield Matrix(f"{root}.ffn_gate", inner, hidden)
        yield Matrix(f"{root}.ffn_up", inner, hidden)
        yield Matrix(f"{root}.ffn_down", hidden, inner)


def _attention(root: str, config: Config, *, has_gate: bool) -> Iterator[Tensor]:
    hidden, head = config["hidden_size"], _head_dim(config)
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    yield Matrix(f"{root}.attn_q", queries * (1 + has_gate), hidden)
    yield Matrix(f"{root}.attn_k", keys, hidden)
    yield Matrix(f"{root}.attn_v", keys, hidden)
    yield Matrix(f"{root}.attn_output", hidden, queries)
    if config.get("attention_bias"):
        for name, size in (("q", queries), ("k", keys), ("v", keys), ("output", hidden)):
            yield Vector(f"{root}.attn_{name}.bias", (size,), 0.0)
        yield Vector(f"{root}.attn_sinks", (config["num_attention_heads"],), 0.0)
    elif config["architectures"] != ["LlamaForCausalLM"]:
        yield Vector(f"{root}.attn_q_norm", (head,))
        yield Vector(f"{root}.attn_k_norm", (head,))


def _experts(root: str, config: Config, *, has_bias: bool) -> Iterator[Tensor]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    count = config["num_experts"]
    yield Matrix(f"{root}.ffn_gate_inp", count, hidden)
    for name, rows, columns in (
        ("gate", inner, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ):
        yield Matrix(f"{root}.ffn_{name}_exps", rows, columns, count)
        if has_bias:
            yield Vector(f"{root}.ffn_{name}_exps.bias", (count, rows), 0.0)
    if has_bias:
        yield Vector(f"{root}.ffn_gate_inp.bias", (count,), 0.0)


def _delta_net(root: str, config: Config) -> Iterator[Tensor]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    mixed = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    yield Matrix(f"{root}.attn_qkv", mixed, hidden)
    yield Matrix(f"{root}.attn_gate", values, hidden)
    yield Matrix(f"{root}.ssm_out", hidden, values)
    yield Matrix(f"{root}.ssm_alpha", heads, hidden)
    yield Matrix(f"{root}.ssm_beta", heads, hidden)
    yield Vector(f"{root}.ssm_conv1d", (mixed, config["linear_conv_kernel_dim"]), 0.25)
    yield Vector(f"{root}.ssm_norm", (config["linear_value_head_dim"],))
    yield Vector(f"{root}.ssm_a", (heads,), -1.0)
    yield Vector(f"{root}.ssm_dt", (heads,), 0.0)


def kind_of(tensor: Tensor, config: Config, format: str) -> Kind:
    """llama-quantize's type of a tensor: more bits for the output, and in Q4_K_M for values and
    ffn_down of some layers."""
    if isinstance(tensor, Vector) or tensor.name.endswith("ffn_gate_inp"):
        return Kind.F32
    base = FORMATS[format]
    if base is Kind.MXFP4:
        return base if tensor.experts else Kind.Q8_0
    output = "token_embd" if config["tie_word_embeddings"] else "output"
    if base in (Kind.Q8_0, Kind.BF16):
        return base
    if tensor.name == output:
        return Kind.Q6_K
    if base is not Kind.Q4_K:
        return base
    root, _, part = tensor.name.rpartition(".")
    if part not in ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps"):
        return base
    layer, layers = int(root.removeprefix("blk.")), config["num_hidden_layers"]
    eighth = layers // 8
    has_more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return Kind.Q6_K if has_more else base


def _announce(writer: gguf.GGUFWriter, tensor: Tensor, kind: Kind) -> None:
    if isinstance(tensor, Matrix):
        elements, size = gguf.constants.GGML_QUANT_SIZES[kind]
        columns = tensor.columns // elements * size
        experts = (tensor.experts,) if tensor.experts else ()
        shape, name = (*experts, tensor.rows, columns), f"{tensor.name}.weight"
        size = int(np.prod(shape))
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, kind)
        return
    suffixes = {"ssm_a": "", "bias": "", "ssm_dt": ".bias"}
    suffix = suffixes.get(tensor.name.rpartition(".")[2], ".weight")
    size = 4 * int(np.prod(tensor.shape))
    writer.add_tensor_info(f"{tensor.name}{suffix}", tensor.shape, np.dtype(np.float32), size)


def _add_vocabulary(
    writer: gguf.GGUFWriter, size: int, pre: str, special: Mapping[str, int]
) -> None:
    """The ids from the first special token on, which is at the end, are all special."""
    letters = ascii_letters + digits + "_-"
    pairs = [(first, second) for first, second in product(letters, letters)]
    triples = [(first + second, third) for (first, second), third in product(pairs, letters)]
    last = min(special.values(), default=size - len(SPECIAL))
    merges = [("Ċ", "Ċ"), *pairs, *triples][: last - 256]  # two line ends: before SmolVLM's tiles
    if len(merges) < last - 256:
        raise SystemExit(f"a vocabulary of {size} tokens is too large; {len(merges)} merges")
    names = {number: name for name, number in special.items()}
    unused = [names.get(each, f"<unused{each}>") for each in range(last, size - len(SPECIAL))]
    tokens = [*byte_alphabet(), *("".join(pair) for pair in merges), *unused, *SPECIAL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * last + [3] * (size - last))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key in the type that llama.cpp reads."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int() if not key.endswith("freq_base"):
            writer.add_uint32(key, value)
        case int() | float() | np.floating():
            writer.add_float32(key, float(value))
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def main() -> None:
    parser = argparse.ArgumentParser(description="A GGUF file with random weights.")
    shapes = [name for name, one in SHAPES.items() if one["architectures"][0] in ARCHITECTURES]  # type: ignore[index]
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("format", choices=list(FORMATS))
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    write(args.shape, args.format, args.path)
    print(f"{args.path}: {args.path.stat().st_size / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
