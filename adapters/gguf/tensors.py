"""The tensors of a GGUF file in Hugging Face's layout.

F32, F16 and BF16 are views of the file, and so are the quantized formats. Where a matrix cannot
stay as it is stored, it is dequantized to float32 exactly as its format defines, a few rows at a
time.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from adapters.gguf.blocks import FORMATS, stored_weight
from adapters.gguf.config import ROPE_TENSORS
from adapters.gguf.file import GgufFile, TensorEntry
from adapters.gguf.floats import FLOATS, drop, read_floats, stored_rows
from adapters.gguf.names import NAMES, Names, part_of
from engine.errors import StartupError
from engine.worker.ports import PreferredFormat, Weight
from engine.worker.weights.formats.grouped import GroupedWeight

Kind = GGMLQuantizationType
EXPERTS_SUFFIX = "_exps"
GATE_UP = "gate_up_exps"
FLAT = ("ssm_a", "ssm_d", "ssm_norm")  # vectors, which Mamba has as matrices
HALVES = {Kind.F16: "float16", Kind.BF16: "bfloat16"}
NO_LINEARS = (*FLAT, "ssm_conv1d", "conv")  # always floats, whatever the linears are


def interleaved_rows(num_rows: int, num_heads: int) -> Tensor:
    """The file's row of each row in Hugging Face's order; int64 `[num_rows]`. llama.cpp puts the
    two halves of a head's RoPE pairs next to each other (Llama's q and k)."""
    heads = torch.arange(num_rows).view(num_heads, -1, 2)
    return heads.transpose(1, 2).flatten()


class ValueHeads(NamedTuple):
    """The heads of Gated DeltaNet layers, which llama.cpp puts into the order in which key heads
    repeat (Qwen 3.5):

        Hugging Face    value heads 0 1 of key head 0, 2 3 of key head 1
        llama.cpp       0 of key head 0, 2 of key head 1, 1 of key head 0, 3 of key head 1
    """

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    def order(self, part: str) -> Tensor | None:
        """The order of `interleaved_rows` for a tensor of a block; the columns of `ssm_out`.

        None if the order is Hugging Face's.
        """
        if self.num_values == self.num_keys:
            return None
        if part in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta"):
            return self._tiled(1)
        if part in ("attn_gate", "ssm_out"):
            return self._tiled(self.value_dim)
        if part in ("attn_qkv", "ssm_conv1d"):
            before = 2 * self.num_keys * self.key_dim
            return torch.cat((torch.arange(before), before + self._tiled(self.value_dim)))
        return None

    def _tiled(self, width: int) -> Tensor:
        """The rows of all value heads, `width` of each."""
        rows = torch.arange(self.num_values * width).view(-1, self.num_keys, width)
        return rows.transpose(0, 1).flatten()


class GgufTensors:
    """A GGUF file as `CheckpointFiles`."""

    def __init__(self, path: Path) -> None:
        self._file = file = GgufFile(path)
        self._architecture = file.text("general.architecture") or ""
        self._names: Names = NAMES[self._architecture]  # `read_config` has checked it
        self._entries = {
            name: _flat(entry) if part_of(name) in FLAT else entry
            for name, entry in split_experts(file.tensors).items()
        }
        self._computes_stored = not self._names.transposed
        self._value_heads = _value_heads(file, self._architecture)
        self._num_layers = _num_layers(file, self._architecture)
        self._stored = {
            self._name(name): name for name in self._entries if name not in ROPE_TENSORS
        }

    @property
    def names(self) -> Set[str]:
        return self._stored.keys()

    @property
    def files(self) -> Sequence[Path]:
        return [each.path for each in self._file.parts]

    @property
    def matrix_kinds(self) -> Set[Kind]:
        """The types of all matrices of linears."""
        tensors = self._file.tensors.items()
        return {
            entry.kind
            for name, entry in tensors
            if len(entry.shape) > 1 and part_of(name) not in NO_LINEARS
        }

    @property
    def preferred_format(self) -> PreferredFormat:
        """The formats of the file; int8 for models whose file has transposed matrices (GPT-2)."""
        kinds = self.matrix_kinds
        floats = floats_of(kinds)
        if kinds <= FLOATS.keys():
            return PreferredFormat(floats=floats)
        stored = sorted(FORMATS[kind].layout.name for kind in kinds & FORMATS.keys())
        return PreferredFormat(
            None if kinds <= {*FLOATS, Kind.Q8_0} else "int8",
            stored=tuple(stored) if self._computes_stored else (),
            floats=floats,
        )

    def shape(self, name: str) -> tuple[int, ...]:
        own = self._stored[name]
        entry = self._entries[own]
        if entry.kind not in {*FLOATS, *FORMATS}:
            raise StartupError(f"tensor {own} is {entry.kind.name}, which is not supported")
        shape = entry.shape
        match part_of(own):
            case "ssm_conv1d" | "conv" if len(shape) > 1:
                return (shape[0], 1, shape[-1])
            case "ffn_gate_inp_shexp":
                return (1, shape[-1])
        return shape[::-1] if self._names.is_transposed(own) else shape

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        own = self._stored[name]
        entry = self._entries[own]
        if entry.kind in FORMATS and self._computes_stored and len(index) == 2:
            columns = range(*index[1].indices(entry.shape[1]))
            if _has_whole_blocks(entry, columns) and self._column_order(own, columns) is None:
                return self._stored_weight(own, entry, index[0], columns)
        return self._read_floats(own, entry, index)

    def _name(self, own: str) -> str:
        """The Hugging Face name; layers for multi-token prediction begin with `mtp`."""
        root, layer, *rest = (*own.split(".", 2), "")
        if root != "blk" or not layer.isdecimal() or int(layer) < self._num_layers:
            return self._names.of(own)
        return self._names.of_mtp(int(layer) - self._num_layers, rest[0])

    def _stored_weight(
        self, own: str, entry: TensorEntry, rows: slice, columns: range
    ) -> GroupedWeight:
        per_block, block_bytes = GGML_QUANT_SIZES[entry.kind]

        def of_file(rows: slice) -> Tensor:
            first, last, _ = rows.indices(entry.shape[0])
            stored = stored_rows(self._file, entry, range(first, last))
            first_byte, last_byte = (
                column // per_block * block_bytes for column in (columns.start, columns.stop)
            )
            return stored[:, first_byte:last_byte]

        found = self._in_order(own, entry, rows, of_file)
        return stored_weight(found, entry.kind, len(columns))

    def _read_floats(self, own: str, entry: TensorEntry, index: tuple[slice, ...]) -> Tensor:
        if self._names.is_transposed(own):
            columns, rows = index
            return self._rows(entry, rows)[:, columns].t()
        rows, *rest = index
        found = self._in_order(own, entry, rows, lambda rows: self._rows(entry, rows))
        match part_of(own):
            case "ssm_conv1d" | "conv" if found.dim() > 1:
                found = found[:, None]
            case "ssm_a":
                found = (-found).log()
            case "ffn_gate_inp_shexp":
                found = found.view(1, -1)
        read = range(*rest[0].indices(found.shape[1])) if rest else range(0)
        order = self._column_order(own, read)
        return (found if order is None else found[:, order])[(slice(None), *rest)]

    def _in_order(
        self, own: str, entry: TensorEntry, rows: slice, read: Callable[[slice], Tensor]
    ) -> Tensor:
        """Some rows in Hugging Face's order, of what `read` gives for rows of the file."""
        order = self._row_order(own, entry)
        wanted = None if order is None else order[rows]
        if wanted is None or not len(wanted):
            return read(rows)
        start, last = int(wanted.min()), int(wanted.max())
        return read(slice(start, last + 1))[wanted - start]

    def _row_order(self, own: str, entry: TensorEntry) -> Tensor | None:
        """The file's row of each row in Hugging Face's order; None if the order is equal."""
        if self._names.is_interleaved(own):
            return interleaved_rows(entry.shape[0], self._num_heads(own))
        part = part_of(own)
        if self._value_heads is None or part == "ssm_out":
            return None
        return self._value_heads.order(part)

    def _column_order(self, own: str, columns: range) -> Tensor | None:
        """The file's column of each column in Hugging Face's order. None if the order is equal, and
        where all columns are read: these stay in the order of the file (`HeadTiles`), or a value
        head would need a part of a block of 256."""
        if self._value_heads is None or part_of(own) != "ssm_out":
            return None
        order = self._value_heads.order("ssm_out")
        return None if order is None or len(columns) == len(order) else order

    def drop_pages(self) -> None:
        drop(self._file)

    def _num_heads(self, own: str) -> int:
        heads = self._file.integer(f"{self._architecture}.attention.head_count") or 1
        if ".attn_k." not in own:
            return heads
        key = f"{self._architecture}.attention.head_count_kv"
        if isinstance(self._file.value(key), list):  # one for each layer
            return int(max(self._file.numbers(key)))
        return self._file.integer(key) or heads

    def _rows(self, entry: TensorEntry, rows: slice) -> Tensor:
        """Some rows with all columns, or some elements of a vector."""
        if len(entry.shape) == 1:
            return read_floats(self._file, entry, range(1))[0, rows]
        first, last, _ = rows.indices(entry.shape[0])
        return read_floats(self._file, entry, range(first, last))


def floats_of(kinds: Set[Kind]) -> str | None:
    """The dtype of 16 bits of all matrices that are not quantized; None without one."""
    unquantized = kinds & FLOATS.keys()
    return HALVES.get(next(iter(unquantized))) if len(unquantized) == 1 else None


def _value_heads(file: GgufFile, architecture: str) -> ValueHeads | None:
    """The heads of a model with Gated DeltaNet layers; None for other models."""
    if not architecture.startswith("qwen35"):
        return None
    names = ("group_count", "time_step_rank", "state_size", "inner_size")
    keys, values, key_dim, width = (file.integer(f"{architecture}.ssm.{name}") for name in names)
    if keys is None or values is None or key_dim is None or width is None:
        return None
    return ValueHeads(keys, values, key_dim, width // max(1, values))


def _num_layers(file: GgufFile, architecture: str) -> int:
    """The layers of the model without those for multi-token prediction."""
    count = file.integer(f"{architecture}.block_count") or 0
    return count - (file.integer(f"{architecture}.nextn_predict_layers") or 0)


def split_experts(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors, those of all experts as one for each: `blk.0.ffn_up_exps.3.weight`. Gate and up
    may be the halves of one tensor."""
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(EXPERTS_SUFFIX) or kind == "scale":
            found[name] = entry
            continue
        count, *shape = entry.shape
        stems = [stem]
        if stem.endswith(GATE_UP):
            stems = [stem.replace(GATE_UP, f"{part}{EXPERTS_SUFFIX}") for part in ("gate", "up")]
            shape[0] //= 2
        for number in range(count * len(stems)):
            expert, part = divmod(number, len(stems))
            start = entry.start + number * entry.num_bytes // (count * len(stems))
            own = replace(entry, shape=tuple(shape), start=start)
            found[f"{stems[part]}.{expert}.{kind}"] = own
    return found


def _flat(entry: TensorEntry) -> TensorEntry:
    """The numbers of a tensor as a vector."""
    return replace(entry, shape=(prod(entry.shape),))


def _has_whole_blocks(entry: TensorEntry, columns: range) -> bool:
    per_block, _ = GGML_QUANT_SIZES[entry.kind]
    return columns.start % per_block == 0 and columns.stop % per_block == 0
