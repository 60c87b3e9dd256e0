"""`Transfers` of a CPU: its tensors are in the host's memory, and its work is done when a call
returns."""

import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.ports import Int64s
from engine.worker.streams import StreamEvent


@dataclass(frozen=True, slots=True)
class Reached:
    """An event, reached when it was recorded."""

    at: float
    is_reached = True

    def wait(self) -> None:
        """A no-op."""

    def seconds_since(self, earlier: StreamEvent) -> float:
        return self.at - cast(Reached, earlier).at


@dataclass(frozen=True, slots=True)
class Here:
    """Tensors that are on the host."""

    tensors: tuple[Tensor, ...]
    is_here = True

    def wait(self) -> tuple[Tensor, ...]:
        return self.tensors


class HostTransfers:
    """Copies nothing."""

    is_async = False

    def put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array)

    def put_inputs(self, *arrays: Int64s) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, *tensors: Tensor) -> Here:
        return Here(tensors)

    def mark(self) -> Reached:
        return Reached(time.monotonic())
