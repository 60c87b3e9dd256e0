"""The integer inputs of a step (ids, positions, row indices), copied to the device in one transfer.

Several pinned buffers are used in rotation: the host fills one while the copy from another may
still be in flight. On the device there is one buffer with a fixed address, as CUDA graphs need;
the compute stream orders its readers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.worker.ports import Int64s
from engine.worker.streams import StreamEvent, Streams

NUM_BUFFERS = 3


class StepArena:
    """Buffers of `capacity` int64 each."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        self._streams = streams
        self._pinned = [streams.pinned((capacity,), torch.int64) for _ in range(NUM_BUFFERS)]
        self._copied: list[StreamEvent | None] = [None] * NUM_BUFFERS
        self._next = 0
        self._buffer = torch.zeros(capacity, dtype=torch.int64, device=streams.device)

    @property
    def capacity(self) -> int:
        """Numbers that one step may have."""
        return len(self._buffer)

    def put(self, *arrays: Int64s) -> list[Tensor]:
        """Copy the arrays to the device, one after the other; the views are valid until the next
        call."""
        index, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        if (copied := self._copied[index]) is not None and not copied.is_reached:
            copied.wait()
        lengths = [len(array) for array in arrays]
        total = sum(lengths)
        np.concatenate(arrays, out=self._pinned[index].numpy()[:total])
        self._streams.copy(self._buffer[:total], self._pinned[index][:total])
        self._copied[index] = self._streams.compute.record()
        return self.views(lengths)

    def views(self, lengths: Sequence[int]) -> list[Tensor]:
        """Views of the device buffer for arrays of these lengths."""
        ends = np.cumsum(lengths).tolist()
        return [self._buffer[end - length : end] for length, end in zip(lengths, ends, strict=True)]
