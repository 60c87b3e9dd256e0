"""How much memory the weights of a GGUF file take, as far as the index of its tensors tells."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType

from gguf.constants import GGMLQuantizationType as Kind

from adapters.gguf.file import GgufFile, TensorEntry

FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
# Bits of a weight in memory where the file has others; a test holds them to the layouts.
CPU_BITS: Mapping[Kind, float] = MappingProxyType(
    {
        Kind.Q2_K: 5.125,
        Kind.Q3_K: 4.5625,
        Kind.Q4_K: 4.625,
        Kind.Q5_K: 5.625,
        Kind.IQ4_XS: 4.3125,
        Kind.MXFP4: 4.5,
    }
)
CUDA_KINDS = (*FLOATS, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.MXFP4)  # all others become int8


def memory_bytes(path: Path, matrix_item: float | None, device: str) -> int:
    """The bytes of all weights; of matrices `matrix_item` each, or None as the device keeps them.
    Raises `StartupError`."""
    entries = GgufFile(path).tensors.values()
    return sum(map(int, (_bytes(entry, matrix_item, device) for entry in entries)))


def _bytes(entry: TensorEntry, matrix_item: float | None, device: str) -> float:
    numbers = prod(entry.shape)
    if matrix_item is not None and len(entry.shape) > 1:
        return numbers * matrix_item
    if not device.startswith("cuda"):
        bits = CPU_BITS.get(entry.kind)
        return entry.num_bytes if bits is None else numbers * bits / 8
    return entry.num_bytes if entry.kind in CUDA_KINDS else numbers
