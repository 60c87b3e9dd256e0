"""Small things between host and device, without anybody waiting.

What goes in lies in pinned memory of its own, which torch keeps until it has been read. What comes
out is copied on a side stream, so that the next step's compute does not wait for the way.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.streams import Stream, StreamEvent, Streams


def put(streams: Streams, array: NDArray[Any]) -> Tensor:
    """The array on the device, for the current stream."""
    source = torch.from_numpy(array)
    pinned = streams.pinned(source.shape, source.dtype)
    pinned.copy_(source)
    target = torch.empty(source.shape, dtype=source.dtype, device=streams.device)
    streams.copy(target, pinned)
    return target


@dataclass(frozen=True, slots=True)
class Carried:
    """Tensors on their way to the host; `sources` must live until they are there."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    arrival: StreamEvent

    def arrived(self) -> tuple[Tensor, ...]:
        """The same on the host, waited for."""
        self.arrival.wait()
        return self.targets


class Outward:
    """The way from the device to the host."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream: Stream = streams.side()

    def carry(self, *sources: Tensor) -> Carried:
        """Copies of what compute has given by now."""
        targets = tuple([self._streams.pinned(one.shape, one.dtype) for one in sources])
        self._stream.hold(self._streams.compute.mark())
        for target, source in zip(targets, sources, strict=True):
            self._stream.do(_copying(self._streams, target, source))
        return Carried(sources, targets, self._stream.mark())


def _copying(streams: Streams, target: Tensor, source: Tensor) -> Any:
    return lambda: streams.copy(target, source)
