"""Random weights of any shape, generated tensor by tensor as they are loaded.

A tensor is a function of its name and shape alone, so that stages and ranks load slices of the
same model. Matrices are uniform with the usual standard deviation of freshly initialised models,
norm weights are 1; hidden states and logits stay finite over any number of layers.
"""

import mmap
import os
import zlib
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeAlias
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import StartupError
from engine.transport.process_memory import available_bytes
from engine.worker.model.kv.kv_tensors import size_text
from engine.worker.ports import Lookup, TensorSlice
from engine.worker.weights.source import Outline

SPREAD = 0.02 * 3**0.5  # half-width of a uniform distribution of standard deviation 0.02
STEP = np.float32(SPREAD / (1 << 15))
CHUNK = 1 << 20  # elements made by one generator
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)


class RandomWeights:
    """A `WeightSource` that has every tensor in every shape."""

    def __init__(self, dtype: torch.dtype, progress: Callable[[str, int, int], None]) -> None:
        self._dtype = dtype
        self._progress = progress
        self._loaded: set[str] = set()
        self._num_expected = 0
        self._buffers = _Buffers()
        self._alive = WeakValueDictionary[TensorSlice, Tensor]()  # a tied head is the embedding
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def __repr__(self) -> str:
        return f"<RandomWeights {len(self._loaded)}/{self._num_expected} loaded>"

    @property
    def names(self) -> Set[str]:
        """The tensors loaded so far, so that none is left over."""
        return self._loaded

    def has(self, name: str) -> bool:
        """False: a random model has no optional tensors."""
        return False

    def outline(self) -> Outline:
        return Outline(self)

    def check(self, part: TensorSlice) -> None:
        """Every name and shape is valid."""

    def expect(self, num_tensors: int) -> None:
        """Set the number of tensors that progress counts up to."""
        self._num_expected = num_tensors

    def skip(self, name: str) -> None:
        self._loaded.add(name)

    def drop_pages(self) -> None:
        """Release the memory that tensors were generated in."""
        self._buffers.clear()

    def tensor(self, part: TensorSlice) -> Tensor:
        """Raises `StartupError` where memory does not hold the tensor."""
        found = self._alive.get(part)
        if found is None:
            found = self._alive[part] = self._generate(part)
        self._loaded.add(part.name)
        self._progress("random weights", len(self._loaded), self._num_expected)
        return found

    def _generate(self, part: TensorSlice) -> Tensor:
        shape = part.stored_shape
        rows, *others = part.ranges[::-1] if part.is_transposed else part.ranges
        if len(shape) == 1:
            found = self._vector(part.name, shape[0])[rows.start : rows.stop]
        else:
            found = self._matrix(part.name, shape, rows)
            if len(others[0]) < shape[1]:
                found = found[:, others[0].start : others[0].stop].contiguous()
        found = found.to(self._dtype)
        return found.t() if part.is_transposed else found

    def weight(self, part: TensorSlice) -> Tensor:
        return self.tensor(part)

    def stored(self, part: TensorSlice) -> Tensor:
        return self.tensor(part)

    def lookup(self, part: TensorSlice) -> Lookup:
        """Rows in the 16 bits that their numbers were made of, half the memory of float32."""
        self._loaded.add(part.name)
        self._progress("random weights", len(self._loaded), self._num_expected)
        return RandomRows(_seed(part.name), part, self._dtype, self._threads)

    def _vector(self, name: str, size: int) -> Tensor:
        if name.endswith(".bias"):
            values = np.empty(size, dtype=np.float32)
            _fill(_seed(name), 0, values)
            return torch.from_numpy(values)
        return torch.ones(size)

    def _matrix(self, name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        """Some rows of a matrix, `[rows, columns]` in float32."""
        width = prod(shape[1:])
        start, stop = rows.start * width, rows.stop * width
        first = start // CHUNK
        size = min(-(-stop // CHUNK) * CHUNK, prod(shape)) - first * CHUNK
        if 4 * size > available_bytes():
            raise StartupError(
                f"tensor {name} needs {size_text(4 * size)}, but {size_text(available_bytes())} of "
                "memory are available"
            )
        begin = start - first * CHUNK
        flat, own = self._buffers.take(size, begin, begin + stop - start)
        _fill_all(_fill, _seed(name), first, flat, self._threads)
        return own.view(len(rows), *shape[1:])


class RandomRows:
    """A `Lookup` in a matrix that is stored as the integers its numbers are multiples of."""

    def __init__(self, seed: int, part: TensorSlice, dtype: torch.dtype, threads: int) -> None:
        rows, columns = part.ranges
        width = part.shape[1]
        first = rows.start * width // CHUNK
        stop = min(-(-rows.stop * width // CHUNK) * CHUNK, prod(part.shape))
        words = np.empty(stop - first * CHUNK, dtype=np.int16)
        _fill_all(_fill_words, seed, first, words, threads)
        begin = rows.start * width - first * CHUNK
        whole = torch.from_numpy(words[begin : begin + len(rows) * width]).view(len(rows), width)
        self._words = whole[:, columns.start : columns.stop]
        self._step = torch.tensor(STEP)
        self._dtype = dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return (self._words[ids].to(torch.float32) * self._step).to(self._dtype)


class _Buffers:
    """Memory for generated tensors, used again once a tensor is gone: fresh pages take longer than
    the numbers in them."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def clear(self) -> None:
        """Give back the memory that is not in use."""
        self._free.clear()

    def take(self, size: int, start: int, stop: int) -> tuple[NDArray[np.float32], Tensor]:
        """An array of `size` elements, and a tensor of its elements `[start, stop)`.

        The memory is in use until the tensor and all views of it are gone.
        """
        fits = [one for one in self._free if 4 * size <= len(one) <= 16 * size]
        if fits:
            memory = min(fits, key=len)
            self._free.remove(memory)
        else:
            memory = mmap.mmap(-1, 4 * size, flags=FLAGS)
        flat = np.frombuffer(memory, dtype=np.float32)[:size]
        own = np.frombuffer(memory, dtype=np.float32)[start:stop]
        finalize(own, self._free.append, memory).atexit = False  # a tensor's storage holds `own`
        return flat, torch.from_numpy(own)


def check_memory(num_bytes: int) -> None:
    """Raise `StartupError` if less than `num_bytes` of memory are available for weights."""
    if num_bytes > (available := available_bytes()):
        raise StartupError(
            f"the model's weights need {size_text(num_bytes)}, but {size_text(available)} of "
            "memory are available; use a smaller model, or a smaller format (--weights, --dtype)"
        )


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


Fill: TypeAlias = Callable[[int, int, NDArray[Any]], None]


def _fill_all(fill: Fill, seed: int, first: int, into: NDArray[Any], threads: int) -> None:
    """Fill with the chunks from number `first` on; numpy generates without the GIL."""
    with ThreadPoolExecutor(threads) as pool:
        for filled in [
            pool.submit(fill, seed, first + at // CHUNK, into[at : at + CHUNK])
            for at in range(0, len(into), CHUNK)
        ]:
            filled.result()


def _fill(seed: int, chunk: int, into: NDArray[np.float32]) -> None:
    """Fill with chunk number `chunk` of the tensor with this seed; each value is one of 65,536."""
    np.multiply(_words(seed, chunk, len(into)), STEP, out=into)


def _fill_words(seed: int, chunk: int, into: NDArray[np.int16]) -> None:
    """The same as the integers that are multiplied by `STEP`."""
    into[:] = _words(seed, chunk, len(into))


def _words(seed: int, chunk: int, count: int) -> NDArray[np.int16]:
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, chunk))))
    words = generator.integers(1 << 64, size=-(-count // 4), dtype=np.uint64)
    return words.view(np.int16)[:count]
