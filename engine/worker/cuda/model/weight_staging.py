"""Weights on their way from files to the GPU: one tensor at a time, through pinned memory.

Pieces go through two pinned buffers in turn, so that the host reads the next piece of the file
while the GPU fetches the one before. Nothing is held on the host beyond that.
"""

from weakref import WeakValueDictionary

from torch import Tensor

from engine.worker.cuda.gpu import Gpu
from engine.worker.ports import WeightSource
from engine.worker.weights.int8_weight import Int8Weight, Weight

PIECE_BYTES = 32 << 20


class OnDevice:
    """A `WeightSource` that brings what another one gives to the GPU."""

    def __init__(self, weights: WeightSource, gpu: Gpu) -> None:
        self._weights = weights
        self._gpu = gpu
        self._there = WeakValueDictionary[tuple[str, range | None, range | None], Tensor]()
        self._staging: Staging | None = None  # from the first tensor on

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def skip(self, name: str) -> None:
        """See `WeightSource`."""
        self._weights.skip(name)

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """See `WeightSource`."""
        found = self._bring(self._weights.take(name, *shape, rows=rows, columns=columns))
        self._there[name, rows, columns] = found
        return found

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
        """See `WeightSource`. A tied head is the embedding that is there already."""
        weight = self._weights.take_matrix(
            name, outputs, inputs, rows=rows, columns=columns, is_transposed=is_transposed
        )
        if isinstance(weight, Int8Weight):
            return Int8Weight(self._bring(weight.values), self._bring(weight.scales))
        if is_transposed:
            return self._bring(weight.t()).t()
        there = self._there.get((name, rows, columns))
        return self._bring(weight) if there is None else there

    def _bring(self, tensor: Tensor) -> Tensor:
        if self._staging is None:
            self._staging = Staging(self._gpu)
        return self._staging.bring(tensor)


class Staging:
    """Two pinned buffers and the way through them."""

    def __init__(self, gpu: Gpu, piece_bytes: int = PIECE_BYTES) -> None:
        self._gpu = gpu
        self._buffers = [gpu.pinned(piece_bytes) for _ in range(2)]
        self._leaves = [gpu.mark() for _ in self._buffers]  # when each may be written again
        self._turn = 0

    def bring(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the GPU, of which pieces may still be on their way."""
        source = tensor.contiguous().view(-1)
        found = source.new_empty(source.shape, device=self._gpu.place)
        count = len(self._buffers[0]) // source.itemsize
        for start in range(0, len(source), count):
            piece = source[start : start + count]
            buffer = self._buffers[self._turn].view(source.dtype)[: len(piece)]
            self._leaves[self._turn].wait()
            buffer.copy_(piece)
            found[start : start + count].copy_(buffer, non_blocking=True)
            self._leaves[self._turn] = self._gpu.mark()
            self._turn = 1 - self._turn
        return found.view(tensor.shape)
