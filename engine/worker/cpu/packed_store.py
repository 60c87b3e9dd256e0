"""The packed weights of a model's linears: from an earlier start's cache file, or packed now."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from torch import Tensor

from engine.worker.cpu.kernels.packed_tiles import WIDTH
from engine.worker.cpu.kernels.vectors import INSTRUCTIONS
from engine.worker.cpu.linears.floats import FLOAT32
from engine.worker.cpu.linears.packed import CpuLinears, PackedWeights
from engine.worker.cpu.pages import WeightPages
from engine.worker.ports import (
    DeferredWeight,
    LinearFormat,
    LinearWeight,
    TensorSlice,
    Weight,
    WeightSource,
    common_format,
    loaded,
)
from engine.worker.weights.packed_cache import source_digest
from engine.worker.weights.packed_file import PackedEntry, PackedFile


def layout_of(linears: Mapping[str, CpuLinears]) -> str:
    """What the layout of packed weights depends on besides the checkpoint."""
    here = Path(__file__).parent
    code = source_digest(here, here.parent / "weights", here.parent / "ports")
    formats = ", ".join(each.description for each in linears.values())
    return f"{formats}; panels of {WIDTH}, {INSTRUCTIONS}, {code}"


class DeferredWeights:
    """A `WeightSource` whose linear weights are read when a device needs them.

    They are converted to `format` then, unless it is None.
    """

    def __init__(self, weights: WeightSource, format: LinearFormat | None) -> None:
        self._weights = weights
        self._format = format

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, part: TensorSlice) -> Tensor:
        return self._weights.tensor(part)

    def weight(self, part: TensorSlice) -> DeferredWeight:
        return DeferredWeight(part, self._read, self._weights.skip)

    def skip(self, name: str) -> None:
        self._weights.skip(name)

    def _read(self, part: TensorSlice) -> Weight:
        weight = loaded(self._weights.weight(part))
        return weight if self._format is None else self._format.convert(weight)


class PackedStore:
    """Packs the weights of linears in the formats `linears`; other weights become float32."""

    def __init__(self, linears: Mapping[str, CpuLinears]) -> None:
        self._linears = linears
        self.open(PackedFile())

    def open(self, file: PackedFile) -> None:
        """Take packed weights from this file, and pack the others into it."""
        self._file = file
        self._pages = WeightPages(file.grow, file.slab_bytes)

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        """The kernels of all these linears."""
        formats = {id(each): each for each in (FLOAT32, *self._linears.values())}
        return tuple(kernel for each in formats.values() for kernel in each.kernels)

    @property
    def file_bytes(self) -> int:
        """Bytes of packed weights that are pages of a file."""
        return self._file.num_bytes

    def packed(self, weights: Sequence[LinearWeight]) -> tuple[CpuLinears, PackedWeights]:
        """The weights stacked along out, and the linears that compute with them."""
        deferred = [weight for weight in weights if isinstance(weight, DeferredWeight)]
        if len(deferred) < len(weights):
            return self._pack(weights)[1:]
        key = " ".join(weight.key for weight in deferred)
        if (found := self._file.find(key)) is not None:
            for weight in deferred:
                weight.skip(weight.part.name)
            return self._linears_of(found.format), _weights_of(found)
        name, linears, packed = self._pack(weights)
        self._file.add(key, _entry_of(name, packed))
        return linears, packed

    def _pack(self, weights: Sequence[LinearWeight]) -> tuple[str, CpuLinears, PackedWeights]:
        parts = [loaded(weight) for weight in weights]
        name = common_format(parts) or ""
        linears = self._linears_of(name)
        return name, linears, linears.pack(parts, self._pages)

    def _linears_of(self, name: str) -> CpuLinears:
        return self._linears.get(name, FLOAT32)


def _entry_of(name: str, packed: PackedWeights) -> PackedEntry:
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return PackedEntry(
        format=name,
        tensors={key: value for key, value in values.items() if isinstance(value, Tensor)},
        sizes={key: value for key, value in values.items() if isinstance(value, int)},
    )


def _weights_of(entry: PackedEntry) -> PackedWeights:
    tensors, sizes = dict(entry.tensors), entry.sizes
    return PackedWeights(
        packed=tensors.pop("packed"), outputs=sizes["outputs"], inputs=sizes["inputs"], **tensors
    )
