"""Tensors as they lie in files: what a checkpoint's format must tell, and safetensors.

Files are mapped and read at first touch; a tensor is a view of its file.
"""

# mypy: disable-error-code="no-untyped-call"
import json
from collections.abc import Sequence, Set
from enum import Enum
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import StartupError
from engine.worker.weights.int8_weight import Int8Weight, Weight
from engine.worker.weights.mappings import drop_pages

INDEX = "model.safetensors.index.json"
SCALE = "_scale"  # after the name of a tensor of 8 bits
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


class PreferredFormat(Enum):
    """What linears are computed in, unless the settings say."""

    FLOATS = "floats"
    STORED = "stored"  # in 8 bits what is stored so, all else in floats
    ROUNDED = "rounded"  # so few bits are stored that 8 lose little more


class CheckpointFiles(Protocol):
    """A checkpoint's tensors by the names of Hugging Face, before anything of them is read."""

    @property
    def names(self) -> Set[str]: ...

    @property
    def suits(self) -> PreferredFormat: ...

    @property
    def files(self) -> Sequence[Path]:
        """What they lie in."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there; raises `StartupError` if its type cannot be read."""
        ...

    def read(self, name: str, wanted: tuple[slice, ...]) -> Weight:
        """A part of a tensor, in the dtype that it is stored in; touches little else."""
        ...

    def drop_pages(self) -> None:
        """Give back what was read of the files."""
        ...


def shards_of(directory: Path) -> dict[str, Path]:
    """Names of all tensors and the file each is in; raises `StartupError`."""
    index = directory / INDEX
    if index.exists():
        return _read_index(index)
    files = sorted(directory.glob("*.safetensors"))
    single = directory / "model.safetensors"
    if single in files:
        files = [single]
    if not files:
        others = sorted(p.name for p in directory.glob("*.bin")) + sorted(
            p.name for p in directory.glob("*.pth")
        )
        found = f", only {others[0]}" if others else ""
        raise StartupError(
            f"{directory} has no *.safetensors file{found}; weights are read from safetensors only"
        )
    return {name: path for path in files for name in _names(path)}


def _read_index(index: Path) -> dict[str, Path]:
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shards = {name: index.parent / Path(file).name for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} is not an index of safetensors: {error!r}") from error
    for path in sorted(set(shards.values())):
        missing = {name for name, at in shards.items() if at == path} - _names(path)
        if missing:
            raise StartupError(f"tensor {min(missing)} is in {index.name} but not in {path.name}")
    return shards


def _names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error


class SafetensorsHeader(Protocol):
    """safetensors' slice of a tensor before anything of it is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor: ...


class SafetensorsFiles:
    """A directory of safetensors as `CheckpointFiles`. Mapped tensors keep their file mapped."""

    suits = PreferredFormat.FLOATS

    def __init__(self, directory: Path) -> None:
        self._shards = shards_of(directory)
        self._files = {
            path: safe_open(path, framework="pt", device="cpu")
            for path in sorted(set(self._shards.values()))
        }

    @property
    def names(self) -> Set[str]:
        return self._shards.keys()

    @property
    def files(self) -> Sequence[Path]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        header = self.header(name)
        if header.get_dtype() not in FLOATS:
            raise StartupError(f"tensor {name} is {header.get_dtype()}, which is not supported")
        return tuple(header.get_shape())

    def read(self, name: str, wanted: tuple[slice, ...]) -> Weight:
        return self.header(name)[wanted]

    def header(self, name: str) -> SafetensorsHeader:
        """What the file says of a tensor that is there."""
        return cast(SafetensorsHeader, self._files[self._shards[name]].get_slice(name))

    def drop_pages(self) -> None:
        drop_pages(self._files)


class QuantizedFiles(SafetensorsFiles):
    """The same where matrices may be int8, each with the scales of its rows beside it."""

    suits = PreferredFormat.STORED

    @property
    def names(self) -> Set[str]:
        names = super().names
        return {name for name in names if not self._is_scale(name)}

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._is_rounded(name):
            return super().shape(name)
        shape = tuple(self.header(name).get_shape())
        scales = tuple(self._scales(name).get_shape())
        if scales not in ((shape[0],), (shape[0], 1)):
            raise StartupError(
                f"tensor {name}{SCALE} has shape {list(scales)}, expected {[shape[0], 1]}"
            )
        return shape

    def read(self, name: str, wanted: tuple[slice, ...]) -> Weight:
        if not self._is_rounded(name):
            return super().read(name, wanted)
        scales = self._scales(name)[wanted[:1]]
        return Int8Weight(self.header(name)[wanted], scales.flatten().to(torch.float32))

    def _is_rounded(self, name: str) -> bool:
        header = self.header(name)
        return header.get_dtype() == "I8" and len(header.get_shape()) == 2

    def _is_scale(self, name: str) -> bool:
        whole = name.removesuffix(SCALE)
        return whole != name and whole in self._shards and self._is_rounded(whole)

    def _scales(self, name: str) -> SafetensorsHeader:
        if name + SCALE not in self._shards:
            raise StartupError(f"tensor {name} is I8 without {name}{SCALE}")
        scales = self.header(name + SCALE)
        if scales.get_dtype() not in FLOATS:
            raise StartupError(f"tensor {name}{SCALE} is {scales.get_dtype()}, not floats")
        return scales
