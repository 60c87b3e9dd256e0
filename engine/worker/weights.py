"""The tensors of a safetensors checkpoint, mapped into memory and read at first touch.

A tensor in the worker's dtype is a view of the file; another dtype is converted, one tensor at
a time. Every tensor of the checkpoint must have a place in the model: what is left over is a
refusal, which every worker finds by building the whole model once without its contents.
"""

# mypy: disable-error-code="no-untyped-call"
import json
from collections.abc import Callable, Set
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import RefusedToStart
from engine.worker.mappings import drop_pages

INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


def shards_of(directory: Path) -> dict[str, Path]:
    """Names of all tensors and the file each is in; raises `RefusedToStart`."""
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
        raise RefusedToStart(
            f"{directory} has no *.safetensors file{found}; weights are read from safetensors only"
        )
    return {name: path for path in files for name in _names(path)}


def _read_index(index: Path) -> dict[str, Path]:
    try:
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        shards = {name: index.parent / Path(file).name for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedToStart(f"{index} is not an index of safetensors: {error!r}") from error
    for path in sorted(set(shards.values())):
        missing = {name for name, at in shards.items() if at == path} - _names(path)
        if missing:
            raise RefusedToStart(f"tensor {min(missing)} is in {index.name} but not in {path.name}")
    return shards


def _names(path: Path) -> set[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise RefusedToStart(f"cannot read {path}: {error}") from error


class _Header(Protocol):
    """safetensors' slice of a tensor before anything of it is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor: ...


class Weights:
    """A checkpoint directory as a `WeightSource`.

    Mapped tensors keep their file mapped; nothing else is held.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, progress: Callable[[str, int, int], None]
    ) -> None:
        self._dtype = dtype
        self._progress = progress
        self._shards = shards_of(directory)
        self._files = {
            path: safe_open(path, framework="pt", device="cpu")
            for path in sorted(set(self._shards.values()))
        }
        self._taken: dict[str, int] = {}
        self._num_wanted = len(self._shards)

    def __repr__(self) -> str:
        return f"<Weights {len(self._taken)}/{len(self._shards)} taken>"

    @property
    def num_taken(self) -> int:
        """Elements taken so far, those of each tensor counted once."""
        return sum(self._taken.values())

    @property
    def names(self) -> Set[str]:
        """All tensors of the checkpoint."""
        return self._shards.keys()

    def has(self, name: str) -> bool:
        return name in self._shards

    def outline(self) -> "Outline":
        """The same names and shapes, without contents."""
        return Outline(self)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `RefusedToStart` unless the tensor is there, in this shape and a dtype of ours."""
        if name not in self._shards:
            raise RefusedToStart(f"tensor {name} is missing from the checkpoint")
        header = self._header(name)
        stored = tuple(header.get_shape())
        if stored != shape:
            raise RefusedToStart(
                f"tensor {name} has shape {list(stored)}, the config asks for {list(shape)}"
            )
        if header.get_dtype() not in DTYPES:
            raise RefusedToStart(f"tensor {name} is {header.get_dtype()}, which is not supported")

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """See `WeightSource`. Pages of the file beyond these rows and columns stay untouched."""
        self.check(name, shape)
        wanted = tuple(
            slice(None) if run is None else slice(run.start, run.stop) for run in (rows, columns)
        )
        tensor = self._header(name)[wanted[: len(shape)]]
        self._taken[name] = self._taken.get(name, 0) + tensor.numel()
        self._progress("weights", len(self._taken), self._num_wanted)
        return tensor.to(self._dtype)

    def drop_pages(self) -> None:
        """Give back what was read of the files: linears have copies, and of an embedding few rows
        are ever read."""
        drop_pages(self._files)

    def expect(self, num_tensors: int) -> None:
        """So many will be taken: what progress counts up to."""
        self._num_wanted = num_tensors

    def _header(self, name: str) -> _Header:
        return cast(_Header, self._files[self._shards[name]].get_slice(name))


class Outline:
    """A `WeightSource` of tensors without contents, which notes what it was asked for."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.taken: dict[str, int] = {}  # elements of each tensor

    @property
    def num_parameters(self) -> int:
        return sum(self.taken.values())

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """See `WeightSource`."""
        self._weights.check(name, shape)
        self.taken[name] = prod(shape)
        lengths = [
            size if run is None else len(run)
            for size, run in zip(shape, (rows, columns), strict=False)
        ]
        return torch.empty(1).expand(lengths)  # one element, whatever its shape

    def check_all_taken(self, ignored: tuple[str, ...]) -> None:
        """Refuse if the checkpoint holds tensors that the model has no place for."""
        for name in sorted(self._weights.names - self.taken.keys()):
            if not any(fnmatch(name, pattern) for pattern in ignored):
                raise RefusedToStart(f"tensor {name} of the checkpoint has no place in the model")
