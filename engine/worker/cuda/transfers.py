"""Small asynchronous copies between host and device.

Copies to the device start from fresh pinned memory, which torch keeps until the copy is done.
Copies to the host run on a separate stream, so that the next step's compute does not wait for
them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.streams import Stream, StreamEvent, Streams


def put(streams: Streams, array: NDArray[Any]) -> Tensor:
    """Copy the array to the device in the current stream."""
    source = torch.from_numpy(array)
    pinned = streams.pinned(source.shape, source.dtype)
    pinned.copy_(source)
    target = torch.empty(source.shape, dtype=source.dtype, device=streams.device)
    streams.copy(target, pinned)
    return target


@dataclass(frozen=True, slots=True)
class CopyToHost:
    """An asynchronous copy to the host; keeps `sources` alive until it is done."""

    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    done: StreamEvent

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host, once the copy is done."""
        self.done.wait()
        return self.targets


class HostTransfer:
    """Starts copies from the device to the host."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream: Stream = streams.side()

    def start(self, *sources: Tensor) -> CopyToHost:
        """Copy tensors that the compute stream has already been submitted."""
        targets = tuple([self._streams.pinned(one.shape, one.dtype) for one in sources])
        self._stream.wait_for(self._streams.compute.record())
        for target, source in zip(targets, sources, strict=True):
            self._stream.submit(_copying(self._streams, target, source))
        return CopyToHost(sources, targets, self._stream.record())


def _copying(streams: Streams, target: Tensor, source: Tensor) -> Any:
    return lambda: streams.copy(target, source)
