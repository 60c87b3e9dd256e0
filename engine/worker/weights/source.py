"""The tensors of a checkpoint as a model asks for them: by name, shape and part.

A tensor in the worker's dtype is a view of the file; another dtype is converted, one tensor at
a time. Every tensor of the checkpoint must have a place in the model: what is left over is a
refusal, which every worker finds by building the whole model once without its contents.
"""

from collections.abc import Callable, Set
from fnmatch import fnmatch
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.weights.checkpoint_files import CheckpointFiles
from engine.worker.weights.int8_weight import Int8Weight, Weight, dequantize


class Weights:
    """A `WeightSource` over what is stored."""

    def __init__(
        self, stored: CheckpointFiles, dtype: torch.dtype, progress: Callable[[str, int, int], None]
    ) -> None:
        self._stored = stored
        self._dtype = dtype
        self._progress = progress
        self._taken: dict[str, int] = {}
        self._num_wanted = len(stored.names)

    def __repr__(self) -> str:
        return f"<Weights {len(self._taken)}/{len(self.names)} taken>"

    @property
    def num_taken(self) -> int:
        """Elements taken so far."""
        return sum(self._taken.values())

    @property
    def names(self) -> Set[str]:
        """All tensors of the checkpoint."""
        return self._stored.names

    def has(self, name: str) -> bool:
        return name in self.names

    def outline(self) -> "Outline":
        """The same names and shapes, without contents."""
        return Outline(self)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `StartupError` unless the tensor is there, in this shape and a type of ours."""
        if name not in self.names:
            raise StartupError(f"tensor {name} is missing from the checkpoint")
        stored = self._stored.shape(name)
        if stored != shape:
            raise StartupError(
                f"tensor {name} has shape {list(stored)}, the config asks for {list(shape)}"
            )

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """See `WeightSource`. Pages of the file beyond these rows and columns stay untouched."""
        return dequantize(self._read(name, shape, (rows, columns)[: len(shape)])).to(self._dtype)

    def take_matrix(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        rows: range | None = None,
        columns: range | None = None,
        is_transposed: bool = False,
    ) -> Weight:
        """See `WeightSource`."""
        if not is_transposed:
            weight = self._read(name, (outputs, inputs), (rows, columns))
            return weight if isinstance(weight, Int8Weight) else weight.to(self._dtype)
        weight = self._read(name, (inputs, outputs), (columns, rows))
        if isinstance(weight, Int8Weight):
            raise StartupError(f"tensor {name} is of 8 bits and [in, out], expected [out, in]")
        return weight.to(self._dtype).t()

    def _read(self, name: str, shape: tuple[int, ...], parts: tuple[range | None, ...]) -> Weight:
        self.check(name, shape)
        wanted = (slice(None) if run is None else slice(run.start, run.stop) for run in parts)
        found = self._stored.read(name, tuple(wanted))
        self._count(name, prod(found.shape))
        return found

    def skip(self, name: str) -> None:
        """See `WeightSource`."""
        self._count(name, 0)

    def _count(self, name: str, elements: int) -> None:
        self._taken[name] = self._taken.get(name, 0) + elements
        self._progress("weights", len(self._taken), self._num_wanted)

    def drop_pages(self) -> None:
        """Give back what was read of the files: linears have copies, and of an embedding few rows
        are ever read."""
        self._stored.drop_pages()

    def expect(self, num_tensors: int) -> None:
        """So many will be taken: what progress counts up to."""
        self._num_wanted = num_tensors


class Surveyed(Protocol):
    """A `WeightSource` that can be asked before anything is taken."""

    @property
    def names(self) -> Set[str]: ...

    def has(self, name: str) -> bool: ...

    def check(self, name: str, shape: tuple[int, ...]) -> None: ...


class Outline:
    """A `WeightSource` of tensors without contents, which notes what it was asked for."""

    def __init__(self, weights: Surveyed) -> None:
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

    def take_matrix(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        rows: range | None = None,
        columns: range | None = None,
        is_transposed: bool = False,
    ) -> Tensor:
        """See `WeightSource`."""
        if is_transposed:
            return self.take(name, inputs, outputs, rows=columns, columns=rows).t()
        return self.take(name, outputs, inputs, rows=rows, columns=columns)

    def skip(self, name: str) -> None:
        """See `WeightSource`."""
        self.taken[name] = 0

    def check_all_taken(self, ignored: tuple[str, ...]) -> None:
        """Refuse if the checkpoint holds tensors that the model has no place for."""
        for name in sorted(self._weights.names - self.taken.keys()):
            if not any(fnmatch(name, pattern) for pattern in ignored):
                raise StartupError(f"tensor {name} of the checkpoint has no place in the model")
