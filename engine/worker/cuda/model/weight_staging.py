"""Copying weights from files to the GPU, one tensor at a time, through two pinned buffers.

The host reads the next piece of the file into one buffer while the GPU copies the other.
"""

from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.ports import Lookup, TensorSlice, Weight, WeightSource, loaded
from engine.worker.streams import Streams

PIECE_BYTES = 32 << 20


class OnDevice:
    """A `WeightSource` that copies the tensors of another source to the GPU."""

    def __init__(self, weights: WeightSource, place: torch.device, streams: Streams) -> None:
        self._weights = weights
        self._place = place
        self._streams = streams
        self._on_gpu = WeakValueDictionary[TensorSlice, Tensor]()
        self._staging: Staging | None = None  # made for the first tensor

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def skip(self, name: str) -> None:
        """Mark a tensor as used without reading it."""
        self._weights.skip(name)

    def tensor(self, part: TensorSlice) -> Tensor:
        """A tensor of the source, on the GPU."""
        found = self._copy(self._weights.tensor(part))
        self._on_gpu[part] = found
        return found

    def lookup(self, part: TensorSlice) -> Lookup:
        """A lookup in a matrix that is on the GPU."""
        return partial(F.embedding, weight=self.tensor(part))

    def weight(self, part: TensorSlice) -> Weight:
        """A weight of the source; a tied output head reuses the embedding that is already on the
        GPU."""
        weight = loaded(self._weights.weight(part))
        if not isinstance(weight, Tensor):
            return weight.map(self._copy)
        if part.is_transposed:
            return self._copy(weight.t()).t()
        on_gpu = self._on_gpu.get(part)
        return self._copy(weight) if on_gpu is None else on_gpu

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._staging is None:
            self._staging = Staging(self._place, self._streams)
        return self._staging.copy_to_gpu(tensor)


class Staging:
    """Two pinned buffers, used alternately."""

    def __init__(
        self, place: torch.device, streams: Streams, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._place = place
        self._streams = streams
        self._buffers = [streams.pinned((piece_bytes,), torch.uint8) for _ in range(2)]
        self._free = [streams.compute.record() for _ in self._buffers]  # to be overwritten
        self._next = 0

    def copy_to_gpu(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the GPU; the last pieces may still be in flight."""
        source = tensor.contiguous().view(-1)
        found = source.new_empty(source.shape, device=self._place)
        count = len(self._buffers[0]) // source.itemsize
        for start in range(0, len(source), count):
            piece = source[start : start + count]
            buffer = self._buffers[self._next].view(source.dtype)[: len(piece)]
            self._free[self._next].wait()
            buffer.copy_(piece)
            self._streams.copy(found[start : start + count], buffer)
            self._free[self._next] = self._streams.compute.record()
            self._next = 1 - self._next
        return found.view(tensor.shape)
