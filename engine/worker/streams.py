"""The port for GPU streams, events, graphs and pinned memory.

The host submits work to a stream and continues; each stream runs its work in order, concurrently
with other streams. `engine.worker.cuda.streams` implements the port with torch.cuda; the tests have
an implementation that records the order and checks the rules.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class StreamEvent(Protocol):
    """A point in a stream, reached when all work submitted before it is done."""

    @property
    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Block the host until the event is reached. Raises `WorkerLost` if the device fails."""

    def seconds_since(self, earlier: "StreamEvent") -> float:
        """Seconds on the device's clock; both events were recorded with `is_timed` and are
        reached."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def submit(self, work: Callable[[], object]) -> None:
        """Call `work` now, with this stream current: its kernels and copies run in this stream."""

    def record(self, *, is_timed: bool = False) -> StreamEvent:
        """An event after all work submitted so far."""

    def wait_for(self, event: StreamEvent) -> None:
        """Work submitted from now on waits for the event; the host does not."""


class Graph(Protocol):
    """A captured CUDA graph: the same kernels on the same addresses, launched at once."""

    def replay(self) -> None:
        """Launch the graph in the compute stream."""


class Streams(Protocol):
    """The streams of one device. Work outside of any `submit` runs in `compute`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def compute(self) -> Stream: ...

    def side(self) -> Stream:
        """A new stream."""

    def pinned(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised page-locked host memory."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between pinned memory and the device in the current stream. The pinned memory must
        not change until an event recorded after the copy is reached."""

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """The graph of `work`, and its result, which every replay overwrites.

        All graphs share one memory pool: a replay may overwrite the results of other graphs.
        """

    def synchronize(self) -> None:
        """Wait until all work of all streams is done. Raises `WorkerLost` if the device fails."""
