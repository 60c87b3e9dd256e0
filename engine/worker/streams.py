"""What the order of work on a GPU is written against: streams, events, graphs, pinned memory.

The host gives work to a stream and goes on; a stream does its work in order, beside the others.
An event marks a place in a stream. `engine.worker.cuda.streams` has torch.cuda's; the tests have
some that record the order and hold to the rules.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class StreamEvent(Protocol):
    """A place in a stream, reached when all work given before it is done."""

    @property
    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Until it is reached: this is the host's wait. Raises `WorkerLost` if the device fails."""
        ...

    def seconds_since(self, earlier: "StreamEvent") -> float:
        """On the device's clock; both were marked with a time and are reached."""
        ...


class Stream(Protocol):
    """Work in order."""

    def do(self, work: Callable[[], object]) -> None:
        """Give it work, which runs at once on the host and later on the device."""
        ...

    def mark(self, *, is_timed: bool = False) -> StreamEvent:
        """An event after what was given so far."""
        ...

    def hold(self, event: StreamEvent) -> None:
        """What is given from now on waits for the event; the host does not."""
        ...


class Graph(Protocol):
    """Work captured once: the same kernels on the same addresses, given as one."""

    def replay(self) -> None:
        """Give it to the stream that computes."""
        ...


class Streams(Protocol):
    """One device. What is written outside of any `do` goes to `compute`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def compute(self) -> Stream: ...

    def side(self) -> Stream:
        """Another stream."""
        ...

    def pinned(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device reads and writes by itself; its content is undefined."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between pinned memory and the device, in the current stream: pinned memory must stay
        as it is until an event marked after the copy is reached."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """The graph of `work` and what it returned, which every replay writes again.

        All graphs share one pool of memory: one overwrites what another returned.
        """
        ...

    def settle(self) -> None:
        """Wait until all that was given to any stream is done: for the start, and for failures.

        Raises `WorkerLost` if the device fails.
        """
        ...
