"""GGUF files written by the `gguf` package from the models of `tests.models.checkpoints`.

Names, types of tensors and the turned rows of Llama's q and k are as llama.cpp's converter has
them; the vocabulary is that of a `tokenizers` object.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import tokenizers
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from examples.benchmarks.peers.random_gguf import add_value
from tests.models.checkpoints import make_model
from tests.models.gguf_k_blocks import WRITERS, quantize_k
from tests.models.gguf_metadata import sizes_of

# Hugging Face model types whose name in llama.cpp is another one.
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_text": "qwen35",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
}
# Their converters reorder the rows of q and k.
INTERLEAVED = ("llama", "granite", "granitehybrid", "nemotron_h", "smollm3")
FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
tensor_names = cache(gguf.get_tensor_name_map)  # making one takes longer than writing its tensors


@dataclass
class Gguf:
    """What a file is to hold; `more` and `without` are keys of its metadata."""

    variant: str
    kind: Kind = Kind.F32
    kinds: dict[str, Kind] = field(default_factory=dict)  # of tensors whose names have this part
    tokenizer: tokenizers.Tokenizer | None = None
    pre: str = "llama-bpe"
    more: dict[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    changes: dict[str, Any] = field(default_factory=dict)  # of the model's config
    extra: dict[str, Tensor] = field(default_factory=dict)  # tensors beside the model's
    tensors_of_a_file: int = 0  # more go to further files; 0: all are in one

    def write(self, path: Path) -> Any:
        """Write the file; returns transformers' model with what the file's tensors stand for."""
        model = make_model(self.variant, **self.changes)
        self.write_model(path, model)
        return model

    def write_model(self, path: Path, model: Any) -> None:
        """Write the file of a model that gets what the file's tensors stand for."""
        family = model.config.model_type
        architecture = ARCHITECTURES.get(family, family)
        model.config.allow_global_per_layer_attribute_access = True  # Gemma 4's head size
        writer = gguf.GGUFWriter(path, architecture, split_max_tensors=self.tensors_of_a_file)
        values = sizes_of(model.config, architecture) | (
            {} if self.tokenizer is None else _byte_level(self.tokenizer, self.pre)
        )
        for key, value in (values | self.more).items():
            if key not in self.without:
                add_value(writer, key, value)
        self._add_tensors(writer, model, architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add_tensors(self, writer: gguf.GGUFWriter, model: Any, architecture: str) -> None:
        names = tensor_names(
            next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
            model.config.num_hidden_layers,
        )
        tensors = dict(model.named_parameters())
        tensors |= {name: each for name, each in model.named_buffers() if "layer_scalar" in name}
        for name, tensor in tensors.items():
            if ".experts." in name:
                self._add_experts(writer, name, tensor, is_interleaved=architecture == "gpt-oss")
            elif name.endswith("scale") and ".router." in name:
                self._store(writer, _scale_name(name), tensor.detach())
            elif _is_of_mamba(names, name):
                own, factor = _own_name(names, name), _multiplier(name, model.config)
                stored = self._add_mamba(writer, own, tensor.detach() * factor, model.config)
                tensor.data.copy_(stored / factor)
            elif name.endswith("shared_mlp.input_linear.weight"):
                self._add_gate_up(writer, name, tensor.detach(), model.config)
            elif ".linear_attn." in name:
                self._add_delta_net(writer, _own_name(names, name), tensor.detach(), model.config)
            else:
                own, factor = _own_name(names, name), _multiplier(name, model.config)
                values = tensor.detach() * factor
                stored = self._add_tensor(writer, own, name, values, model.config)
                tensor.data.copy_(stored / factor)
        for own, values in self.extra.items():
            writer.add_tensor(own, values.numpy())

    def _add_tensor(
        self, writer: gguf.GGUFWriter, own: str, name: str, values: Tensor, config: Any
    ) -> Tensor:
        """Returns what the file's tensor stands for, in Hugging Face's layout."""
        if name.endswith(".conv.conv.weight"):
            return self._store(writer, own, values[:, 0].contiguous())[:, None]
        is_transposed = writer.arch == "gpt2" and _is_conv(name)
        is_reordered = writer.arch in INTERLEAVED and any(f"{part}_proj" in name for part in "qk")
        offset = 1 if _has_offset(writer.arch, name) else 0
        values = values.t() if is_transposed else values + offset
        if is_reordered:
            values = _turned(values, config, is_key="k_proj" in name)
        stored = self._store(writer, own, values.contiguous())
        if is_reordered:
            stored = _turned_back(stored, config, is_key="k_proj" in name)
        return stored.t() if is_transposed else stored - offset

    def _add_mamba(self, writer: gguf.GGUFWriter, own: str, values: Tensor, config: Any) -> Tensor:
        """Returns what the file's tensor stands for, in Hugging Face's layout."""
        match own.split(".")[2]:
            case "ssm_a":
                writer.add_tensor(own, -values.exp()[:, None].numpy())
            case "ssm_d":
                writer.add_tensor(own, values[:, None].numpy())
            case "ssm_norm":
                groups = getattr(config, "mamba_n_groups", None) or config.n_groups
                writer.add_tensor(own, values.view(groups, -1).numpy())
            case "ssm_conv1d" if values.dim() > 1:
                writer.add_tensor(own, values[:, 0].contiguous().numpy())
            case _:
                return self._store(writer, own, values)
        return values

    def _add_delta_net(
        self, writer: gguf.GGUFWriter, own: str, values: Tensor, config: Any
    ) -> None:
        """A tensor of a Gated DeltaNet as the converter writes it: value heads in the order in
        which key heads repeat. Only that of its outputs is quantized."""
        keys, heads = config.linear_num_key_heads, config.linear_num_value_heads

        def turned(each: Tensor, width: int, first: int, second: int) -> Tensor:
            split = each.reshape(first, second, width, *each.shape[1:])
            return split.transpose(0, 1).reshape(each.shape)

        def tiled(each: Tensor, width: int) -> Tensor:
            return turned(each, width, keys, heads // keys)

        part, width = own.split(".")[2], config.linear_value_head_dim
        before = 2 * keys * config.linear_key_head_dim
        match part:
            case "ssm_a":
                values = tiled(-values.exp(), 1)
            case "ssm_dt" | "ssm_alpha" | "ssm_beta":
                values = tiled(values, 1)
            case "attn_gate":
                values = tiled(values, width)
            case "ssm_out":
                columns = tiled(values.t().contiguous(), width)
                stored = self._store(writer, own, columns.t().contiguous())
                values.copy_(turned(stored.t(), width, heads // keys, keys).t())
                return
            case "attn_qkv" | "ssm_conv1d":
                values = values.reshape(len(values), -1)
                values = torch.cat((values[:before], tiled(values[before:], width)))
        writer.add_tensor(own, values.contiguous().numpy())

    def _add_gate_up(self, writer: gguf.GGUFWriter, name: str, values: Tensor, config: Any) -> None:
        """The halves of one tensor, as two."""
        suffix = "_shexp" if config.num_local_experts else ""
        for part, half in zip(("gate", "up"), values.chunk(2), strict=True):
            own = f"blk.{name.split('.')[2]}.ffn_{part}{suffix}.weight"
            half.copy_(self._store(writer, own, half.contiguous()))

    def _add_experts(
        self, writer: gguf.GGUFWriter, name: str, tensor: Any, *, is_interleaved: bool
    ) -> None:
        """One tensor for each linear of all experts; gpt-oss has them as [experts, in, out]."""
        layer, linear = name.split(".")[2], name.rpartition(".")[2]
        kind = "bias" if linear.endswith("_bias") else "weight"
        values = tensor.detach()
        if is_interleaved and kind == "weight":
            values = values.transpose(1, 2)
        if not linear.startswith("gate_up"):
            parts = {"down": values}
        elif writer.arch == "gemma4":
            parts = {"gate_up": values}
        elif is_interleaved:
            parts = {"gate": values[:, ::2], "up": values[:, 1::2]}
        else:
            half = values.shape[1] // 2
            parts = {"gate": values[:, :half], "up": values[:, half:]}
        for part, each in parts.items():
            own = f"blk.{layer}.ffn_{part}_exps.{kind}"
            each.copy_(self._store(writer, own, each.contiguous(), is_matrix=kind == "weight"))

    def _store(
        self, writer: gguf.GGUFWriter, own: str, values: Tensor, *, is_matrix: bool = True
    ) -> Tensor:
        """Put a tensor into the file; returns what it stands for there, as floats."""
        kind = next((kind for part, kind in self.kinds.items() if part in own), self.kind)
        kind = kind if is_matrix and values.dim() > 1 else Kind.F32
        if kind is Kind.F32:
            writer.add_tensor(own, values.numpy())
            return values
        quantize = quantize_k if kind in WRITERS else gguf.quants.quantize
        data = quantize(values.numpy(), kind)
        writer.add_tensor(own, data, raw_dtype=kind)
        return torch.from_numpy(gguf.quants.dequantize(data, kind))


def _own_name(names: Any, name: str) -> str:
    """llama.cpp's name; some tensors have another suffix than in Hugging Face's."""
    renamed = name.replace(".dt_bias", ".dt_proj.bias").replace(
        "moe.router.w", "moe.router.layer.w"
    )
    suffixes = (".weight", ".bias")
    own = names.get_name(renamed, try_suffixes=suffixes)
    if own is None:  # of Nemotron-H
        own = names.get_name(renamed.replace("model.", "backbone."), try_suffixes=suffixes)
    assert own is not None, name
    return f"{own}.weight" if name.endswith(("sinks", "layer_scalar")) else str(own)


def _is_of_mamba(names: Any, name: str) -> bool:
    return ".mamba." in name or (".mixer." in name and ".ssm_" in _own_name(names, name))


def _scale_name(name: str) -> str:
    """llama.cpp's name of Gemma 4's scales of the router and of experts."""
    part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
    return f"blk.{name.split('.')[2]}.{part}.scale"


def _multiplier(name: str, config: Any) -> Any:
    """What the converter multiplies a weight of Falcon-H1 with; 1 for other models."""
    if config.model_type != "falcon_h1":
        return 1.0
    read = config.attention_in_multiplier
    if name.endswith("in_proj.weight"):
        keys = config.mamba_n_groups * config.mamba_d_state
        width = config.mamba_n_heads * config.mamba_d_head
        rows = torch.tensor([width, width, keys, keys, config.mamba_n_heads])
        parts = torch.tensor(config.ssm_multipliers) * config.ssm_in_multiplier
        return parts.repeat_interleave(rows)[:, None]
    factors = {
        "q_proj": read,
        "k_proj": read * config.key_multiplier,
        "v_proj": read,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return factors.get(name.split(".")[-2], 1.0)


def _has_offset(architecture: str, name: str) -> bool:
    """Whether the converter adds 1 to this norm."""
    if architecture in ("qwen35", "qwen35moe"):
        return name.endswith("norm.weight") and ".linear_attn." not in name
    return architecture in ("gemma2", "gemma3") and name.endswith("norm.weight")


def _is_conv(name: str) -> bool:
    return name.endswith(".weight") and (".attn.c_" in name or ".mlp.c_" in name)


def _heads(config: Any, is_key: bool) -> int:
    return int(config.num_key_value_heads if is_key else config.num_attention_heads)


def _turned(values: Tensor, config: Any, *, is_key: bool) -> Tensor:
    """Rows of a head, first half and second half in turn."""
    halves = values.view(_heads(config, is_key), 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _turned_back(values: Tensor, config: Any, *, is_key: bool) -> Tensor:
    pairs = values.view(_heads(config, is_key), -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _byte_level(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    data = json.loads(tokenizer.to_str())
    added = {token["id"]: token for token in data["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda each: each[1])
    kinds = [
        1 if place not in added else 3 if added[place]["special"] else 4 for _, place in tokens
    ]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
