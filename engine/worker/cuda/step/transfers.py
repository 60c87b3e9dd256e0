"""`Transfers` of a GPU: small asynchronous copies between host and device, and events.

Copies to the device start from fresh pinned memory, which torch keeps until the copy is done.
Copies to the host run on a separate stream, so that the next step's compute does not wait for
them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cuda.step.arena import StepArena
from engine.worker.cuda.streams import EXACT_BYTES
from engine.worker.ports import Int64s
from engine.worker.streams import Stream, StreamEvent, Streams


def put(streams: Streams, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor of the host to the device in the current stream, in its own or another
    dtype."""
    target = torch.empty(source.shape, dtype=dtype or source.dtype, device=streams.device)
    flat, copied = source.reshape(-1), target.view(-1)
    count = (EXACT_BYTES - 1) // target.itemsize  # larger pinned memory is never given back
    for start in range(0, len(flat), count):
        piece = flat[start : start + count]
        pinned = streams.pinned(piece.shape, target.dtype)
        pinned.copy_(piece)
        streams.copy(copied[start : start + count], pinned)
    return target


@dataclass(frozen=True, slots=True)
class CopyToHost:
    """An asynchronous copy to the host; keeps `sources` alive until it is done."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    done: StreamEvent

    @property
    def is_here(self) -> bool:
        return self.done.is_reached

    def wait(self) -> tuple[Tensor, ...]:
        self.done.wait()
        return self.targets


class DeviceTransfers:
    """Copies to and from the device of `streams`, without waiting."""

    is_async = True

    def __init__(self, streams: Streams, arena: StepArena) -> None:
        self._streams = streams
        self._stream: Stream = streams.side()
        self.arena = arena

    def put(self, array: NDArray[Any]) -> Tensor:
        return put(self._streams, torch.from_numpy(array))

    def put_inputs(self, *arrays: Int64s) -> list[Tensor]:
        """In the arena, where graphs read them; a prompt that is too long for it is no decode."""
        if sum(map(len, arrays)) > self.arena.capacity:
            return [self.put(array) for array in arrays]
        return self.arena.put(*arrays)

    def fetch(self, *tensors: Tensor) -> CopyToHost:
        targets = tuple([self._streams.pinned(each.shape, each.dtype) for each in tensors])
        self._stream.wait_for(self._streams.compute.record())
        for target, source in zip(targets, tensors, strict=True):
            self._stream.submit(partial(self._streams.copy, target, source))
        return CopyToHost(tensors, targets, self._stream.record())

    def mark(self) -> StreamEvent:
        return self._streams.compute.record(is_timed=True)
