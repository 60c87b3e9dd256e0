"""Rows of a matrix that stays in the checkpoint's files, such as an embedding.

They are read by a system call each. To read a row of a mapped file takes a page fault, which costs
more, and the system then counts up to 2 MiB around the row as this process's memory. Rows that the
system has not cached are requested from the disk together, before the first is waited for: those of
128 tokens one after the other took 12 ms on a virtual disk, and together 3 ms.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from engine.worker.ports import Weight
from engine.worker.weights.mappings import file_mappings


class FilePlace(NamedTuple):
    """The place in a file at which a tensor begins that is a view of its mapping."""

    path: Path
    offset: int
    inode: int


class FileRows:
    """Reads rows of a tensor from its file, a descriptor that is closed with this object."""

    def __init__(self, file: int, offset: int, tensor: Tensor) -> None:
        self._file = file
        finalize(self, os.close, file)
        self._offset = offset
        self._shape = tensor.shape
        self._dtype = tensor.dtype
        self._stride = tensor.stride(0) * tensor.itemsize
        self._row_bytes = tensor[0].nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows [n, …] of `ids` [n]. Raises `IndexError` for an unknown row, and `OSError`."""
        found = np.empty((len(ids), self._row_bytes), dtype=np.uint8)
        places = [self._place(row) for row in ids.tolist()]
        if len(places) > 1:
            for at in places:
                os.posix_fadvise(self._file, at, self._row_bytes, os.POSIX_FADV_WILLNEED)
        for row, at in enumerate(places):
            if os.preadv(self._file, [found[row]], at) != self._row_bytes:
                raise OSError("the checkpoint changed while it was served: restart the server")
        return torch.from_numpy(found).view(self._dtype).view(len(ids), *self._shape[1:])

    def _place(self, row: int) -> int:
        if not 0 <= row < self._shape[0]:
            raise IndexError(f"row {row} of {self._shape[0]}")
        return self._offset + row * self._stride


class StoredRows:
    """A `Lookup` in a matrix that is stored in any dtype or format, perhaps in mapped files."""

    def __init__(self, weight: Weight, dtype: torch.dtype, files: Sequence[Path] = ()) -> None:
        self._weight = weight
        self._dtype = dtype
        tensors = [weight] if isinstance(weight, Tensor) else [*weight.tensors.values()]
        self._rows = {id(each): rows_of(each, files) for each in tensors}

    def __call__(self, ids: Tensor) -> Tensor:
        weight = self._weight
        if isinstance(weight, Tensor):
            found = self._rows[id(weight)](ids)
        else:
            found = weight.map(lambda tensor: self._rows[id(tensor)](ids)).dequantize()
        return found.to(self._dtype)


def rows_of(tensor: Tensor, files: Sequence[Path]) -> Callable[[Tensor], Tensor]:
    """Reads rows of a tensor: from its file if it is a view of one of `files`."""
    place = place_of(tensor, files)
    if place is None or tensor.dim() < 2 or not tensor[0].is_contiguous():
        return lambda ids: tensor[ids]
    file = os.open(place.path, os.O_RDONLY)
    if os.fstat(file).st_ino != place.inode:  # it was replaced meanwhile
        os.close(file)
        return lambda ids: tensor[ids]
    return FileRows(file, place.offset, tensor)


def place_of(tensor: Tensor, files: Sequence[Path]) -> FilePlace | None:
    """The tensor's place in one of `files`; None if it is in other memory."""
    if tensor.numel() == 0:
        return None
    start = tensor.data_ptr()
    for addresses, path, offset, inode in file_mappings(files):
        if start in addresses:
            return FilePlace(path, offset + start - addresses.start, inode)
    return None
