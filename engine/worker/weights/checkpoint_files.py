"""The files of a checkpoint: what every file format has to provide, and safetensors.

Files are memory-mapped: a tensor is a view of its file, and its pages are read when first used.
"""

# mypy: disable-error-code="no-untyped-call"
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from types import EllipsisType
from typing import Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import StartupError
from engine.worker.ports import PreferredFormat, Weight
from engine.worker.weights.formats.int8 import INT8, Int8Weight
from engine.worker.weights.headers import shards_of
from engine.worker.weights.mappings import drop_pages

SCALE = "_scale"  # suffix of the scales of an int8 tensor
FLOATS = ("F64", "F32", "F16", "BF16")  # dtype names of safetensors
HALVES = {"F16": "float16", "BF16": "bfloat16"}  # those of 16 bits


class CheckpointFiles(Protocol):
    """The tensors of a checkpoint under Hugging Face's names, before any of them is read."""

    @property
    def names(self) -> Set[str]: ...

    @property
    def preferred_format(self) -> PreferredFormat:
        """What linears are computed in when the setting `weights` is "auto"."""

    @property
    def files(self) -> Sequence[Path]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an existing tensor; raises `StartupError` if its dtype is not supported."""

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        """A slice of a tensor in its stored dtype or format; other pages are hardly touched."""

    def drop_pages(self) -> None:
        """Release the file pages read so far from this process's memory."""


class SafetensorsHeader(Protocol):
    """safetensors' handle of a tensor, which reads nothing until it is indexed."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: tuple[slice, ...] | EllipsisType) -> Tensor: ...


class SafetensorsFiles:
    """A directory of safetensors. A tensor that is a view of a file keeps the file mapped."""

    def __init__(self, directory: Path) -> None:
        self._shards = shards_of(directory)
        self._names: Set[str] = self._shards.keys()  # subclasses show others
        self._files = {
            path: safe_open(path, framework="pt", device="cpu")
            for path in sorted(set(self._shards.values()))
        }

    @property
    def names(self) -> Set[str]:
        return self._names

    @property
    def preferred_format(self) -> PreferredFormat:
        return PreferredFormat(floats=self.floats_of(self.names))

    @property
    def files(self) -> Sequence[Path]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        header = self.header(name)
        if header.get_dtype() not in FLOATS:
            raise StartupError(f"tensor {name} is {header.get_dtype()}, which is not supported")
        return tuple(header.get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        return self.header(name)[index]

    def header(self, name: str) -> SafetensorsHeader:
        """The header of an existing tensor."""
        return cast(SafetensorsHeader, self._files[self._shards[name]].get_slice(name))

    def floats_of(self, names: Iterable[str]) -> str | None:
        """The dtype of 16 bits that all these tensors have; None without one."""
        dtypes = {self.header(name).get_dtype() for name in names}
        return HALVES.get(next(iter(dtypes))) if len(dtypes) == 1 else None

    def drop_pages(self) -> None:
        names = {path: name for name, path in self._shards.items()}
        drop_pages(self._files[path].get_slice(name)[...] for path, name in names.items())


class BareFiles(SafetensorsFiles):
    """A directory of safetensors that a base model without head was saved to: its tensors lack the
    prefix `model.` (Qwen3-Embedding)."""

    PREFIX = "model."
    MARK = "embed_tokens.weight"  # a tensor that such a directory has

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._names = {self.PREFIX + name for name in self._shards}

    def header(self, name: str) -> SafetensorsHeader:
        return super().header(name.removeprefix(self.PREFIX))


class QuantizedFiles(SafetensorsFiles):
    """A directory of safetensors in which matrices may be int8, each with its row scales."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._names = {name for name in self._shards if not self._is_scale(name)}

    @property
    def preferred_format(self) -> PreferredFormat:
        return PreferredFormat(INT8.name, stored=(INT8.name,))

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._is_int8(name):
            return super().shape(name)
        shape = tuple(self.header(name).get_shape())
        scales = tuple(self._scales(name).get_shape())
        if scales not in ((shape[0],), (shape[0], 1)):
            raise StartupError(
                f"tensor {name}{SCALE} has shape {list(scales)}, expected {[shape[0], 1]}"
            )
        return shape

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        if not self._is_int8(name):
            return super().read(name, index)
        scales = self._scales(name)[index[:1]]
        return Int8Weight(self.header(name)[index], scales.flatten().to(torch.float32))

    def _is_int8(self, name: str) -> bool:
        header = self.header(name)
        return header.get_dtype() == "I8" and len(header.get_shape()) == 2

    def _is_scale(self, name: str) -> bool:
        whole = name.removesuffix(SCALE)
        return whole != name and whole in self._shards and self._is_int8(whole)

    def _scales(self, name: str) -> SafetensorsHeader:
        if name + SCALE not in self._shards:
            raise StartupError(f"tensor {name} is I8 without {name}{SCALE}")
        scales = self.header(name + SCALE)
        if scales.get_dtype() not in FLOATS:
            raise StartupError(f"tensor {name}{SCALE} is {scales.get_dtype()}, expected floats")
        return scales
