"""Reads the layout of a GGUF file: metadata, and the type, shape and offset of each tensor.

The `gguf` package reads the same but creates several arrays per vocabulary entry: 6 s for 150,000
tokens, in each process. Here a value is decoded only when it is requested. Types and block sizes
come from the package.
"""

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import StartupError
from engine.files import split_files

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes between the starts of tensors, unless general.alignment is set
MAX_DIMENSIONS = 4
MAX_INDICES = 64

_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and offset of one tensor; the last dimension is contiguous, as in torch."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    part: int = 0  # number of the file, of a model in several

    @property
    def row_bytes(self) -> int:
        per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // per_block * block_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


# Of the files that were read last, by path, size, time and inode: a start reads several documents
# of one file, and an index of 300,000 strings takes 40 ms.
_indices: dict[tuple[Path, int, int, int], tuple[dict[str, int], dict[str, TensorEntry]]] = {}


class _Cursor:
    """A read position in the file. Reading past the end raises `struct.error`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def numbers(self, code: str, count: int = 1) -> tuple[int | float | bool, ...]:
        layout = struct.Struct(f"<{count}{code}")
        found = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return found

    def integer(self, code: str) -> int:
        return int(self.numbers(code)[0])

    def text(self) -> str:
        start = self._past_text()
        return self._data[start : self.at].decode("utf-8", errors="replace")

    def _past_text(self) -> int:
        start = self.at + 8
        stop = start + struct.unpack_from("<Q", self._data, self.at)[0]
        if stop > len(self._data):
            raise struct.error("a string extends past the end of the file")
        self.at = stop
        return start

    def value(self) -> object:
        """Read a value, which its type precedes."""
        kind = GGUFValueType(self.integer("I"))
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.numbers(_NUMBERS[kind])[0]
        inner, count = GGUFValueType(self.integer("I")), self.integer("Q")
        if inner is GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        return list(self.numbers(_NUMBERS[inner], count))

    def skip_value(self) -> None:
        """Move past a value without decoding it."""
        kind, count = GGUFValueType(self.integer("I")), 1
        if kind is GGUFValueType.ARRAY:
            kind, count = GGUFValueType(self.integer("I")), self.integer("Q")
        if kind is not GGUFValueType.STRING:
            self.at += struct.calcsize(f"<{_NUMBERS[kind]}") * count
            return
        self.skip_texts(count)

    def skip_texts(self, count: int) -> None:
        for _ in range(count):
            self._past_text()


class GgufFile:
    """A memory-mapped file with an index of its metadata and tensors.

    The metadata of a model in several files is in the first one.
    """

    def __init__(self, path: Path, part: int = 0) -> None:
        """Raises `StartupError` if the file is not a complete GGUF file or not this part of a
        model, or if another part is missing."""
        self.path = path
        self.tensors = self._open(path)
        self.parts = [self]  # the model's files
        for number, each in enumerate(self._check_split(part)[1:], 1):
            other = GgufFile(each, number)
            placed = {name: replace(entry, part=number) for name, entry in other.tensors.items()}
            self.tensors = self.tensors | placed
            self.parts.append(other)

    def _open(self, path: Path) -> dict[str, TensorEntry]:
        """Map the file; returns its tensors."""
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                stat = os.fstat(file.fileno())
        except (OSError, ValueError) as error:
            raise StartupError(f"{path} cannot be read: {error}") from error
        state = (path.absolute(), stat.st_size, stat.st_mtime_ns, stat.st_ino)
        found = _indices.get(state)
        # The byte offset of each value of the metadata, and the tensors
        self._values, tensors = found or ({}, {})
        if found is not None:
            return tensors
        try:
            tensors = self._read()
        except (struct.error, KeyError, ValueError, OverflowError) as error:
            raise StartupError(f"{path} is not a complete GGUF file: {error}") from error
        _indices[state] = self._values, tensors
        while len(_indices) > MAX_INDICES:
            del _indices[next(iter(_indices))]
        return tensors

    def _check_split(self, part: int) -> list[Path]:
        """The files of the model whose first one this is; otherwise the file itself."""
        paths, count = split_files(self.path), self.integer("split.count") or 1
        own = self.integer("split.no") or 0
        if own != part or (part == 0 and len(paths) != count):
            raise self.error(
                f"split.count: this is number {own + 1} of a model's {count} files; the first one, "
                f"whose name has to end with -00001-of-{count:05}.gguf, stands for all of them"
            )
        return paths

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the metadata."""
        return tuple(self._values)

    def value(self, key: str) -> object:
        """A value of the metadata; None if the key is absent."""
        if key not in self._values:
            return None
        cursor = _Cursor(self.data)
        cursor.at = self._values[key]
        try:
            return cursor.value()
        except (struct.error, KeyError, ValueError) as error:
            raise StartupError(f"{self.path}: {key} cannot be read: {error}") from error

    def error(self, message: str) -> StartupError:
        """An error that names this file, for the caller to raise."""
        return StartupError(f"{self.path.name}: {message}")

    def text(self, key: str) -> str | None:
        """A string of the metadata; None if the key is absent."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, "a string")

    def integer(self, key: str) -> int | None:
        """An integer of the metadata; None if the key is absent."""
        value = self.value(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._wrong(key, "an integer")

    def flag(self, key: str) -> bool | None:
        """A boolean of the metadata; None if the key is absent."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, "true or false")

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty if the key is absent."""
        value = self.value(key) or []
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise self._wrong(key, "a list of strings")

    def texts_at(self, key: str, places: Iterable[int]) -> dict[int, str]:
        """Some items of a list of strings by their places; those outside the list are left out."""
        cursor, count = self._list_of_texts(key)
        found, at = {}, 0
        for place in sorted(set(places)):
            if 0 <= place < count:
                cursor.skip_texts(place - at)
                found[place], at = cursor.text(), place + 1
        return found

    def num_texts(self, key: str) -> int:
        """The length of a list of strings; 0 if the key is absent."""
        return self._list_of_texts(key)[1]

    def _list_of_texts(self, key: str) -> tuple[_Cursor, int]:
        """The place of the first item of a list of strings, and their number."""
        cursor = _Cursor(self.data)
        if key not in self._values:
            return cursor, 0
        cursor.at = self._values[key]
        if cursor.numbers("II") != (GGUFValueType.ARRAY, GGUFValueType.STRING):
            raise self._wrong(key, "a list of strings")
        return cursor, cursor.integer("Q")

    def numbers(self, key: str) -> list[float]:
        """A list of numbers; empty if the key is absent."""
        value = self.value(key) or []
        if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
            return value
        raise self._wrong(key, "a list of numbers")

    def _wrong(self, key: str, wanted: str) -> StartupError:
        return self.error(f"{key} is {str(self.value(key))[:60]!r}, expected {wanted}")

    def _read(self) -> dict[str, TensorEntry]:
        cursor = _Cursor(self.data)
        if self.data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        cursor.at = 4
        version = cursor.integer("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported; known: {VERSIONS}")
        num_tensors, num_values = cursor.integer("Q"), cursor.integer("Q")
        for _ in range(num_values):
            key = cursor.text()
            self._values[key] = cursor.at
            cursor.skip_value()
        found = [_entry(cursor) for _ in range(num_tensors)]
        alignment = self.integer("general.alignment") or ALIGNMENT
        first = -(-cursor.at // alignment) * alignment
        return {name: self._located(name, first, entry) for name, entry in found}

    def _located(self, name: str, first: int, entry: TensorEntry) -> TensorEntry:
        """The entry with its absolute offset in the file."""
        placed = replace(entry, start=first + entry.start)
        per_block, _ = GGML_QUANT_SIZES[entry.kind]
        if entry.shape[-1] % per_block:
            raise ValueError(f"the row length of tensor {name} is not a multiple of {per_block}")
        if placed.start + placed.num_bytes > len(self.data):
            raise ValueError(f"tensor {name} ends past the end of the file")
        return placed


def _entry(cursor: _Cursor) -> tuple[str, TensorEntry]:
    """A tensor's name and entry, with `start` relative to the first tensor."""
    name, num_dimensions = cursor.text(), cursor.integer("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    sizes = [int(size) for size in cursor.numbers("Q", num_dimensions)]
    kind = GGMLQuantizationType(cursor.integer("I"))
    return name, TensorEntry(kind, tuple(reversed(sizes)), cursor.integer("Q"))


def shortest_decimal(value: object) -> object:
    """A float32 as the shortest decimal that rounds to it; other values unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
