"""A GPU's stream and memory, on tensors of the CPU: what `flashinfer_stand_in` computes in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POISON = -77


class StandInStream:
    """A queue of work that the device has not done yet; `calls` are the arguments of all plans and
    runs, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.log: list[str] = []  # what the host waited for, with how many copies were pending
        self._queue: list[Callable[[], object]] = []
        self._done = 0
        self._pinned: set[int] = set()
        self._device: set[int] = set()

    @property
    def given(self) -> int:
        return len(self._queue)

    def on_device(self, size: int, dtype: torch.dtype) -> Tensor:
        fill = POISON % 256 if dtype == torch.uint8 else POISON
        tensor = torch.full((size,), fill, dtype=dtype)
        self._device.add(tensor.untyped_storage().data_ptr())
        return tensor

    def pinned(self, num_bytes: int) -> Tensor:
        tensor = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.check_device("target", target, target.dtype)
        self.check_pinned("source", source, target.dtype)
        assert target.shape == source.shape
        self.later(lambda: target.copy_(source))

    def event(self) -> "StandInEvent":
        return StandInEvent(self)

    def later(self, work: Callable[[], object]) -> None:
        """Give work to the stream."""
        self._queue.append(work)

    def go_on(self, until: int) -> None:
        """Let the device do the first `until` pieces of work ever given."""
        while self._done < until:
            self._queue[self._done]()
            self._done += 1

    def catch_up(self) -> None:
        """Let the device do all it was given."""
        self.go_on(len(self._queue))

    def is_done(self, until: int) -> bool:
        return self._done >= until

    def check_pinned(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.untyped_storage().data_ptr() not in self._pinned:
            raise ValueError(f"{name} is not in pinned memory of the host")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")

    def check_device(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if tensor.untyped_storage().data_ptr() not in self._device:
            raise ValueError(f"{name} is not on the device")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")


class StandInEvent:
    """See `DeviceEvent`."""

    def __init__(self, stand_in: StandInStream) -> None:
        self._stand_in = stand_in
        self._at = 0

    def record(self) -> None:
        self._at = self._stand_in.given

    def synchronize(self) -> None:
        if not self._stand_in.is_done(self._at):
            self._stand_in.log.append("waited")
        self._stand_in.go_on(self._at)
