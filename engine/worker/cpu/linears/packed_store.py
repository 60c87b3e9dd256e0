"""The packed weights of a model's linears: from an earlier start's cache file, or packed now."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from engine.files import source_digest
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.vectors import INSTRUCTIONS
from engine.worker.cpu.linears.floats import FLOAT32
from engine.worker.cpu.linears.packed import CpuLinears, PackedWeights
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import (
    DeferredWeight,
    LinearFormat,
    LinearWeight,
    Lookup,
    StoredWeights,
    TensorSlice,
    Weight,
    dequantize,
    format_of,
    loaded,
)
from engine.worker.weights.mappings import CachedPages, CachedRun
from engine.worker.weights.packed_file import PackedEntry, PackedFile
from engine.worker.weights.random import RandomWeights

MAX_MADE = 32 << 20  # numbers of a random matrix that exist in float32 at a time


def layout_of(linears: Mapping[str, CpuLinears]) -> str:
    """What the layout of packed weights depends on besides the checkpoint."""
    here = Path(__file__).parents[1]
    code = source_digest(here, here.parent / "weights", here.parent / "ports")
    formats = ", ".join(each.description for each in linears.values())
    return f"{formats}; panels of {WIDTH}, {INSTRUCTIONS}, {code}"


class DeferredWeights:
    """A `WeightSource` whose linear weights are read when a device needs them.

    They are converted to `format` then, unless it is None. Once they are packed, those of `pages`
    that they were read from are freed, but for embeddings, whose rows are read again.
    """

    def __init__(
        self, weights: StoredWeights, format: LinearFormat | None, pages: CachedPages
    ) -> None:
        self._weights = weights
        self._format = format
        self._pages = pages
        self._looked_up = set[str]()
        self._read_from = dict[TensorSlice, Sequence[CachedRun]]()

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, part: TensorSlice) -> Tensor:
        return self._weights.tensor(part)

    def weight(self, part: TensorSlice) -> DeferredWeight:
        return DeferredWeight(part, self._read, self._weights.skip, self._release)

    def lookup(self, part: TensorSlice) -> Lookup:
        self._looked_up.add(part.name)
        return self._weights.lookup(part)

    def skip(self, name: str) -> None:
        self._weights.skip(name)

    def _read(self, part: TensorSlice) -> Weight:
        if isinstance(self._weights, RandomWeights):  # files are mapped
            blocks = row_blocks(part, MAX_MADE)
            return join_rows([self._convert(self._weights.stored(each)) for each in blocks])
        found = self._weights.stored(part)
        if part.name not in self._looked_up:
            self._read_from[part] = self._pages.read(found)
        return self._convert(found)

    def _convert(self, weight: Weight) -> Weight:
        if self._format is not None:
            return self._format.convert(weight)
        return weight.to(torch.float32) if isinstance(weight, Tensor) else weight

    def _release(self, part: TensorSlice) -> None:
        self._pages.free(self._read_from.pop(part, ()))


def row_blocks(part: TensorSlice, max_elements: int) -> list[TensorSlice]:
    """The slice in blocks of rows of at most so many elements, or of one row."""
    if part.is_transposed or len(part.sizes) != 2:
        return [part]
    rows, step = part.ranges[0], max(1, max_elements // part.sizes[1])
    return [replace(part, rows=rows[at : at + step]) for at in range(0, len(rows), step)]


def join_rows(blocks: Sequence[Weight]) -> Weight:
    """Blocks of rows of one format as one weight."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([dequantize(each) for each in blocks])
    tensors = [[*each.tensors.values()] for each in blocks if not isinstance(each, Tensor)]
    joined = {id(parts[0]): torch.cat(parts) for parts in zip(*tensors, strict=True)}
    return first.map(lambda tensor: joined[id(tensor)])


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
        """The kernels of all these linears, and those that pack their weights."""
        formats = {id(each): each for each in (FLOAT32, *self._linears.values())}
        return tuple(
            kernel for each in formats.values() for kernel in (*each.kernels, *each.packing_kernels)
        )

    @property
    def usual_kernels(self) -> tuple[Callable[..., None], ...]:
        """The kernels of these linears without those of float32, if there are others. A first start
        needs those that pack first."""
        others = [each for each in self._linears.values() if each is not FLOAT32] or [FLOAT32]
        packing = [kernel for each in others for kernel in each.packing_kernels]
        return tuple(dict.fromkeys([*packing, *(k for each in others for k in each.kernels)]))

    @property
    def file_bytes(self) -> int:
        """Bytes of packed weights that are pages of a file and stay in memory."""
        return self._file.resident_bytes

    def check(self) -> None:
        """Check the file in use, see `PackedFile.check`."""
        self._file.check()

    def packed(
        self, pool: NativeThreadPool, weights: Sequence[LinearWeight], *, is_sparse: bool = False
    ) -> list[tuple[CpuLinears, PackedWeights]]:
        """The weights stacked along out, and the linears that compute with them.

        Weights of several formats make several linears, each of neighbours of one format. With
        `is_sparse` not every step reads them.
        """
        deferred = [weight for weight in weights if isinstance(weight, DeferredWeight)]
        if len(deferred) == len(weights) and (found := self._find(deferred)) is not None:
            for weight in deferred:
                weight.skip(weight.part.name)
            return [(self._linears_of(entry.format), _weights_of(entry)) for entry in found]
        return [self._pack(pool, run, is_sparse) for run in runs_of_one_format(weights)]

    def _find(self, weights: Sequence[DeferredWeight]) -> list[PackedEntry] | None:
        """The entries of the file for these weights, None if it lacks some of them."""
        found, first = [], 0
        while first < len(weights):
            for last in range(len(weights), first, -1):
                entry = self._file.find(_key(weights[first:last]))
                if entry is not None:
                    found.append(entry)
                    first = last
                    break
            else:
                return None
        return found

    def _pack(
        self,
        pool: NativeThreadPool,
        run: Sequence[tuple[LinearWeight, Weight]],
        is_sparse: bool,
    ) -> tuple[CpuLinears, PackedWeights]:
        """Pack neighbours of one format, and add them to the file unless they cannot be named."""
        weights = [weight for _, weight in run]
        name = format_of(weights[0])
        linears = self._linears_of(name)
        packed = linears.pack(weights, self._pages, pool)
        deferred = [each for each, _ in run if isinstance(each, DeferredWeight)]
        if len(deferred) == len(run):
            self._file.add(_key(deferred), _entry_of(name, packed, is_sparse))
        for each in deferred:
            each.release(each.part)
        return linears, packed

    def _linears_of(self, name: str) -> CpuLinears:
        return self._linears.get(name, FLOAT32)


def runs_of_one_format(
    weights: Sequence[LinearWeight],
) -> list[list[tuple[LinearWeight, Weight]]]:
    """Neighbours whose formats are equal, each weight with itself as it was loaded."""
    pairs = [(weight, loaded(weight)) for weight in weights]
    return [list(run) for _, run in groupby(pairs, lambda pair: format_of(pair[1]))]


def _key(weights: Sequence[DeferredWeight]) -> str:
    return " ".join(weight.key for weight in weights)


def _entry_of(name: str, packed: PackedWeights, is_sparse: bool) -> PackedEntry:
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return PackedEntry(
        format=name,
        tensors={key: value for key, value in values.items() if isinstance(value, Tensor)},
        sizes={key: value for key, value in values.items() if isinstance(value, int)},
        is_sparse=is_sparse,
    )


def _weights_of(entry: PackedEntry) -> PackedWeights:
    tensors, sizes = dict(entry.tensors), entry.sizes
    return PackedWeights(
        packed=tensors.pop("packed"), outputs=sizes["outputs"], inputs=sizes["inputs"], **tensors
    )
