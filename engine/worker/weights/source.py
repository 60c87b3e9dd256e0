"""The tensors of a checkpoint as a model reads them: by name, shape and slice.

A tensor in the worker's dtype is a view of the mapped file; other dtypes are converted, one tensor
at a time, and an embedding one row at a time. Every tensor of the checkpoint must have a place in
the model: each worker first builds the whole model without its contents, and a tensor left over is
an error.
"""

from collections.abc import Callable, Set
from fnmatch import fnmatch
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.ports import Lookup, TensorSlice, Weight, dequantize
from engine.worker.weights.checkpoint_files import CheckpointFiles
from engine.worker.weights.stored_rows import StoredRows


class Weights:
    """A `WeightSource` that reads the files of a checkpoint."""

    def __init__(
        self, files: CheckpointFiles, dtype: torch.dtype, progress: Callable[[str, int, int], None]
    ) -> None:
        self._files = files
        self._dtype = dtype
        self._progress = progress
        self._loaded: dict[str, int] = {}
        self._num_expected = len(files.names)

    def __repr__(self) -> str:
        return f"<Weights {len(self._loaded)}/{len(self.names)} loaded>"

    @property
    def num_loaded(self) -> int:
        """Matrix elements loaded so far."""
        return sum(self._loaded.values())

    @property
    def names(self) -> Set[str]:
        """All tensors of the checkpoint."""
        return self._files.names

    def has(self, name: str) -> bool:
        return name in self.names

    def outline(self) -> "Outline":
        """The same names and shapes, without contents."""
        return Outline(self)

    def check(self, part: TensorSlice) -> None:
        """Raise `StartupError` unless the tensor is there, in this shape and a known dtype."""
        if part.name not in self.names:
            raise StartupError(f"tensor {part.name} is missing from the checkpoint")
        found, expected = self._files.shape(part.name), part.stored_shape
        if found != expected:
            raise StartupError(
                f"tensor {part.name} has shape {list(found)}, but config.json implies "
                f"{list(expected)}"
            )

    def tensor(self, part: TensorSlice) -> Tensor:
        """Pages of the file beyond these rows and columns are not read."""
        found = dequantize(self._read(part)).to(self._dtype)
        return found.t() if part.is_transposed else found

    def weight(self, part: TensorSlice) -> Weight:
        """Quantized where the file stores it quantized."""
        found = self.stored(part)
        return found.to(self._dtype) if isinstance(found, Tensor) else found

    def stored(self, part: TensorSlice) -> Weight:
        """The same with floats in the dtype of the file."""
        found = self._read(part)
        if part.as_floats:
            found = dequantize(found)
        if not isinstance(found, Tensor):
            if part.is_transposed:
                raise StartupError(
                    f"tensor {part.name} is {found.format} stored as [in, out], "
                    "but only [out, in] is supported"
                )
            return found
        return found.t() if part.is_transposed else found

    def lookup(self, part: TensorSlice) -> Lookup:
        """The matrix stays in the file, in its dtype or format: only rows are converted."""
        return StoredRows(self._read(part), self._dtype, self._files.files)

    def _read(self, part: TensorSlice) -> Weight:
        """The tensor as it is stored, so perhaps transposed."""
        self.check(part)
        found = self._files.read(part.name, part.stored_index)
        self._count(part.name, prod(found.shape))
        return found

    def skip(self, name: str) -> None:
        self._count(name, 0)

    def _count(self, name: str, elements: int) -> None:
        self._loaded[name] = self._loaded.get(name, 0) + elements
        self._progress("weights", len(self._loaded), self._num_expected)

    def drop_pages(self) -> None:
        """Release the file pages read so far: linears have copies, and of an embedding only a few
        rows are ever read."""
        self._files.drop_pages()

    def expect(self, num_tensors: int) -> None:
        """Set the number of tensors that progress counts up to."""
        self._num_expected = num_tensors


class Surveyed(Protocol):
    """A `WeightSource` that knows names and shapes before it loads anything."""

    @property
    def names(self) -> Set[str]: ...

    def has(self, name: str) -> bool: ...

    def check(self, part: TensorSlice) -> None: ...


class Outline:
    """A `WeightSource` of tensors without contents, which records what was requested."""

    def __init__(self, weights: Surveyed) -> None:
        self._weights = weights
        self.requested: dict[str, int] = {}  # elements of each tensor

    @property
    def num_parameters(self) -> int:
        return sum(self.requested.values())

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def tensor(self, part: TensorSlice) -> Tensor:
        self._weights.check(part)
        self.requested[part.name] = prod(part.shape)
        return torch.empty(()).expand(part.sizes)  # one element, whatever its shape

    def weight(self, part: TensorSlice) -> Tensor:
        return self.tensor(part)

    def lookup(self, part: TensorSlice) -> Lookup:
        return StoredRows(self.tensor(part), torch.float32)

    def skip(self, name: str) -> None:
        self.requested[name] = 0

    def check_all_requested(self, ignored: tuple[str, ...]) -> None:
        """Raise `StartupError` if the checkpoint holds tensors that the model does not use."""
        for name in sorted(self._weights.names - self.requested.keys()):
            if not any(fnmatch(name, pattern) for pattern in ignored):
                raise StartupError(f"tensor {name} of the checkpoint is not used by the model")
