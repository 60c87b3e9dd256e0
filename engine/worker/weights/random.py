"""Random weights of any shape, drawn tensor by tensor as they are taken: a model without a file.

A tensor is a function of its name, shape and place alone, so that stages and ranks cut the same
model. Matrices are uniform with the spread that checkpoints begin their training with, the
weights of norms are 1; hidden states and logits stay finite over any number of layers.
"""

import mmap
import os
import zlib
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import StartupError
from engine.worker.model.kv_tensors import available_bytes
from engine.worker.weights.source import Outline

SPREAD = 0.02 * 3**0.5  # of a uniform draw with a standard deviation of 0.02
CHUNK = 1 << 20  # elements that one generator draws


class RandomWeights:
    """A `WeightSource` that has every tensor asked for, in every shape."""

    def __init__(self, dtype: torch.dtype, progress: Callable[[str, int, int], None]) -> None:
        self._dtype = dtype
        self._progress = progress
        self._taken: set[str] = set()
        self._num_wanted = 0
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def __repr__(self) -> str:
        return f"<RandomWeights {len(self._taken)}/{self._num_wanted} taken>"

    @property
    def names(self) -> Set[str]:
        """Those taken so far: nothing is left over."""
        return self._taken

    def has(self, name: str) -> bool:
        """No: a tensor that a model may do without, it does without."""
        return False

    def outline(self) -> Outline:
        return Outline(self)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """All is well."""

    def expect(self, num_tensors: int) -> None:
        """So many will be taken: what progress counts up to."""
        self._num_wanted = num_tensors

    def skip(self, name: str) -> None:
        """See `WeightSource`."""
        self._taken.add(name)

    def drop_pages(self) -> None:
        """Nothing is held."""

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """See `WeightSource`. Raises `StartupError` where memory does not hold the tensor."""
        wanted = range(shape[0]) if rows is None else rows
        if len(shape) == 1:
            whole = self._vector(name, shape[0])[wanted.start : wanted.stop]
        else:
            whole = self._matrix(name, shape, wanted)
            if columns is not None:
                whole = whole[:, columns.start : columns.stop].contiguous()
        self._taken.add(name)
        self._progress("random weights", len(self._taken), self._num_wanted)
        return whole.to(self._dtype)

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

    def _vector(self, name: str, size: int) -> Tensor:
        if name.endswith(".bias"):
            drawn = np.empty(size, dtype=np.float32)
            _draw(_seed(name), 0, drawn)
            return torch.from_numpy(drawn)
        return torch.ones(size)

    def _matrix(self, name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        """These rows of it, `[rows, columns]`, in float32."""
        width = prod(shape[1:])
        start, stop = rows.start * width, rows.stop * width
        first = start // CHUNK
        size = min(-(-stop // CHUNK) * CHUNK, prod(shape)) - first * CHUNK
        if 4 * size > available_bytes():
            raise StartupError(
                f"tensor {name} needs {4 * size} bytes, but {available_bytes()} are available"
            )
        flat = _room(size)
        seed, chunks = _seed(name), range(0, size, CHUNK)
        with ThreadPoolExecutor(self._threads) as pool:  # numpy draws without the lock
            for drawn in [
                pool.submit(_draw, seed, first + at // CHUNK, flat[at : at + CHUNK])
                for at in chunks
            ]:
                drawn.result()
        own = flat[start - first * CHUNK : stop - first * CHUNK]
        return torch.from_numpy(own).view(len(rows), *shape[1:])


def check_room(num_bytes: int) -> None:
    """Raise `StartupError` if memory will not hold weights of about so many bytes."""
    if num_bytes > (available := available_bytes()):
        raise StartupError(
            f"random weights of {num_bytes / 2**30:.1f} GiB do not fit into the "
            f"{available / 2**30:.1f} GiB of memory that are available"
        )


def _room(size: int) -> NDArray[np.float32]:
    """So many elements, with all their pages at once: one by one they take longer than drawing."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    return np.frombuffer(mmap.mmap(-1, 4 * size, flags=flags), dtype=np.float32)


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


def _draw(seed: int, chunk: int, into: NDArray[np.float32]) -> None:
    """Fill with chunk number `chunk` of the tensor of this seed: one of 65,536 values each."""
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, chunk))))
    words = generator.integers(1 << 64, size=-(-len(into) // 4), dtype=np.uint64)
    np.multiply(words.view(np.int16)[: len(into)], np.float32(SPREAD / (1 << 15)), out=into)
