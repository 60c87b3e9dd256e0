"""The port for what a step copies between host and device, and for its events.

On a CPU the copies are the tensors themselves and all events are reached. On a GPU the host goes on
while they are made.
"""

from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from engine.worker.ports import Int64s
from engine.worker.streams import StreamEvent


class Fetched(Protocol):
    """Tensors of a device on their way to the host."""

    @property
    def is_here(self) -> bool: ...

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host, once they are there."""


class Transfers(Protocol):
    """Copies and events of the steps on one device."""

    @property
    def is_async(self) -> bool:
        """Whether the device still works on a step when the host has submitted it."""

    def put(self, array: NDArray[Any]) -> Tensor:
        """The array on the device; work submitted from now on sees it."""

    def put_inputs(self, *arrays: Int64s) -> list[Tensor]:
        """The inputs of a step's layers, in one copy; valid until the next call."""

    def fetch(self, *tensors: Tensor) -> Fetched:
        """Copy tensors to the host once the work submitted so far has computed them."""

    def mark(self) -> StreamEvent:
        """A timed event after all work submitted so far."""
