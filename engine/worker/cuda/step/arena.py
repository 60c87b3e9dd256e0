"""What the layers of a step read besides weights and KV, copied to the device as one piece.

Pinned arenas take turns: the host writes the next one while the copy of the last may still be
read. On the device there is one place, always the same, as graphs want it; the stream that
computes orders its readers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.worker.model.layout import Int64s
from engine.worker.streams import StreamEvent, Streams

NUM_ARENAS = 3


class StepArena:
    """Room for `capacity` int64 in all."""

    def __init__(self, streams: Streams, capacity: int) -> None:
        self._streams = streams
        self._pinned = [streams.pinned((capacity,), torch.int64) for _ in range(NUM_ARENAS)]
        self._read: list[StreamEvent | None] = [None] * NUM_ARENAS
        self._turn = 0
        self._place = torch.zeros(capacity, dtype=torch.int64, device=streams.device)

    def put(self, *arrays: Int64s) -> list[Tensor]:
        """The arrays on the device, one behind the other from its beginning, until the next."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_ARENAS
        if (read := self._read[turn]) is not None and not read.is_reached:
            read.wait()
        lengths = [len(array) for array in arrays]
        total = sum(lengths)
        np.concatenate(arrays, out=self._pinned[turn].numpy()[:total])
        self._streams.copy(self._place[:total], self._pinned[turn][:total])
        self._read[turn] = self._streams.compute.mark()
        return self.views(lengths)

    def views(self, lengths: Sequence[int]) -> list[Tensor]:
        """Where arrays of these lengths lie on the device."""
        ends = np.cumsum(lengths).tolist()
        return [self._place[end - length : end] for length, end in zip(lengths, ends, strict=True)]
