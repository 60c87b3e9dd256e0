"""The tensors of a safetensors checkpoint, mapped into memory and read at first touch.

A tensor in the worker's dtype is a view of the file; another dtype is converted, one tensor at
a time. Every tensor of the checkpoint must be asked for: what is left over is a refusal.
"""

# mypy: disable-error-code="no-untyped-call"
import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import RefusedToStart

INDEX = "model.safetensors.index.json"


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

    def __repr__(self) -> str:
        return f"<Weights {len(self._taken)}/{len(self._shards)} taken>"

    @property
    def num_parameters(self) -> int:
        """Elements of the tensors taken so far, each tensor counted once."""
        return sum(self._taken.values())

    def has(self, name: str) -> bool:
        return name in self._shards

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in the worker's dtype; raises `RefusedToStart` if missing or misshapen."""
        if name not in self._shards:
            raise RefusedToStart(f"tensor {name} is missing from the checkpoint")
        file = self._files[self._shards[name]]
        stored = tuple(file.get_slice(name).get_shape())
        if stored != shape:
            raise RefusedToStart(
                f"tensor {name} has shape {list(stored)}, the config asks for {list(shape)}"
            )
        tensor: Tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise RefusedToStart(f"tensor {name} is {tensor.dtype}, which is not supported")
        self._taken[name] = tensor.numel()
        self._progress("weights", len(self._taken), len(self._shards))
        return tensor.to(self._dtype)

    def check_all_taken(self, ignored: tuple[str, ...]) -> None:
        """Refuse if the checkpoint holds tensors that the model has no place for."""
        for name in sorted(self._shards.keys() - self._taken.keys()):
            if not any(fnmatch(name, pattern) for pattern in ignored):
                raise RefusedToStart(f"tensor {name} of the checkpoint has no place in the model")
