"""The tensors of a GGUF file in Hugging Face's layout, dequantized to floats.

F32, F16 and BF16 are views of the file; quantized tensors are dequantized to float32 exactly as
their format defines, a few rows at a time.
"""

from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from adapters.gguf.file import GgufFile, TensorEntry
from adapters.gguf.names import NAMES, ROPE_FACTORS, Names
from engine.errors import StartupError
from engine.worker.ports import PreferredFormat
from engine.worker.weights.mappings import drop_pages

Kind = GGMLQuantizationType
FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
FLOAT_LIKE = {*FLOATS, Kind.Q8_0}  # worth computing in float32
QUANTISED = {
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ4_NL, Kind.IQ4_XS),
}
ELEMENTS_AT_ONCE = 1 << 20


class GgufTensors:
    """A GGUF file as `CheckpointFiles`."""

    def __init__(self, path: Path) -> None:
        self._file = file = GgufFile(path)
        self._architecture = file.text("general.architecture") or ""
        self._names: Names = NAMES[self._architecture]  # `read_config` has checked it
        self._stored = {self._names.of(name): name for name in file.tensors if name != ROPE_FACTORS}

    @property
    def names(self) -> Set[str]:
        return self._stored.keys()

    @property
    def files(self) -> Sequence[Path]:
        return (self._file.path,)

    @property
    def preferred_format(self) -> PreferredFormat:
        """int8 if any matrix has fewer bits than Q8_0, whose values only floats hold exactly."""
        kinds = {entry.kind for entry in self._file.tensors.values() if len(entry.shape) > 1}
        return PreferredFormat() if kinds <= FLOAT_LIKE else PreferredFormat("int8")

    def shape(self, name: str) -> tuple[int, ...]:
        own = self._stored[name]
        entry = self._file.tensors[own]
        if entry.kind not in FLOATS and entry.kind not in QUANTISED:
            raise StartupError(f"tensor {own} is {entry.kind.name}, which is not supported")
        shape = entry.shape
        return shape[::-1] if self._names.is_transposed(own) else shape

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        own = self._stored[name]
        entry = self._file.tensors[own]
        if self._names.is_transposed(own):
            columns, rows = index
            return self._rows(entry, rows)[:, columns].t()
        rows, *rest = index
        if not self._names.is_interleaved(own):
            return self._rows(entry, rows)[(slice(None), *rest)]
        first, last, _ = rows.indices(entry.shape[0])
        width = entry.shape[0] // self._num_heads(own)
        start, stop = first // width * width, -(-last // width) * width
        found = self._rows(entry, slice(start, stop))
        pairs = found.reshape(-1, width // 2, 2, *found.shape[1:])
        halves = pairs.transpose(1, 2).reshape(found.shape)
        return halves[(slice(first - start, last - start), *rest)]

    def drop_pages(self) -> None:
        drop_pages([self._file.path])

    def _num_heads(self, own: str) -> int:
        heads = self._file.integer(f"{self._architecture}.attention.head_count") or 1
        if ".attn_k." in own:
            return self._file.integer(f"{self._architecture}.attention.head_count_kv") or heads
        return heads

    def _rows(self, entry: TensorEntry, rows: slice) -> Tensor:
        """Some rows with all columns, or some elements of a vector."""
        if len(entry.shape) == 1:
            return self._matrix(entry, range(1))[0, rows]
        first, last, _ = rows.indices(entry.shape[0])
        return self._matrix(entry, range(first, last))

    def _matrix(self, entry: TensorEntry, rows: range) -> Tensor:
        columns, row_bytes = entry.shape[-1], entry.row_bytes
        start, num_bytes = entry.start + rows.start * row_bytes, len(rows) * row_bytes
        if entry.kind in FLOATS:
            dtype = FLOATS[entry.kind]
            found = torch.frombuffer(
                self._file.data, dtype=dtype, count=len(rows) * columns, offset=start
            )
            return found.view(len(rows), columns)
        stored = np.frombuffer(self._file.data, np.uint8, num_bytes, start)
        stored = stored.reshape(len(rows), row_bytes)
        whole = torch.empty(len(rows), columns)
        step = max(1, ELEMENTS_AT_ONCE // columns)
        for at in range(0, len(rows), step):
            piece = dequantize(stored[at : at + step], entry.kind)
            whole[at : at + step] = torch.from_numpy(piece)
        return whole
