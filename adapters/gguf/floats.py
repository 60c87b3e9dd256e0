"""Rows of a GGUF file's tensors, as they are stored and as floats."""

import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from adapters.gguf.file import GgufFile, TensorEntry
from engine.worker.weights.mappings import drop_pages

FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
ELEMENTS_AT_ONCE = 1 << 20


def stored_rows(file: GgufFile, entry: TensorEntry, rows: range) -> Tensor:
    """Some rows as the file has them, uint8 `[rows, row bytes]`."""
    start, num_bytes = entry.start + rows.start * entry.row_bytes, len(rows) * entry.row_bytes
    if not num_bytes:
        return torch.empty((len(rows), 0), dtype=torch.uint8)
    data = file.parts[entry.part].data
    found = torch.frombuffer(data, dtype=torch.uint8, count=num_bytes, offset=start)
    return found.view(len(rows), entry.row_bytes)


def read_floats(file: GgufFile, entry: TensorEntry, rows: range) -> Tensor:
    """Some rows `[rows, columns]` in their dtype, in float32 if they are quantized."""
    columns = entry.shape[-1]
    if entry.kind in FLOATS:
        return stored_rows(file, entry, rows).view(FLOATS[entry.kind])
    stored = stored_rows(file, entry, rows).numpy()
    whole = torch.empty(len(rows), columns)
    step = max(1, ELEMENTS_AT_ONCE // columns)
    for at in range(0, len(rows), step):
        piece = dequantize(stored[at : at + step], entry.kind)
        whole[at : at + step] = torch.from_numpy(piece)
    return whole


def drop(file: GgufFile) -> None:
    """Release the pages read so far of the model's files from this process's memory."""
    drop_pages([torch.frombuffer(each.data, dtype=torch.uint8) for each in file.parts])
