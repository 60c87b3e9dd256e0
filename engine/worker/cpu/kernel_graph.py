"""Kernel calls written down once, to be run again by one native call without any Python.

Theory of operation. Layers are Python that fills in operands and runs kernels, and for steps of
one shape these calls are the same each time: the same kernels over the same addresses. While a
tape is recorded the calls run as ever, and each is also copied to the tape with its operands;
results lie in the tape's memory, which stays. Played later, after new inputs were written where
the recorded ones lay, the calls give new results where the recorded ones were: the idea of a CUDA
graph. So whatever a recorded call points to must stay where it is: weights do, and everything
that is made on the way has to come from `Team.room`.
"""

from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CALL_WORDS = 3  # kernel, address of the operands, chunks


class OperandMemory:
    """Places for results, one for each kind, which all tapes of a team share: one plays at a
    time, and no kernel reads what an earlier call of its own kind made."""

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at the place of its kind. A place that is too small is made anew; who took
        the old one keeps it."""
        num_bytes = prod(shape) * dtype.itemsize
        place = self._places.get(kind)
        if place is None or len(place) < num_bytes:
            place = torch.empty(1 << max(num_bytes - 1, 63).bit_length(), dtype=torch.uint8)
            self._places[kind] = place
        return place[:num_bytes].view(dtype).view(shape)


class KernelGraph:
    """Calls in the order in which they were made, and all that must outlive them."""

    def __init__(self, memory: OperandMemory) -> None:
        self._memory = memory
        self._calls: list[tuple[int, int, int]] = []
        self._operands: list[NDArray[np.int64]] = []
        self._taken: list[Tensor] = []
        self._table: NDArray[np.int64] = np.empty((0, CALL_WORDS), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a result; see `OperandMemory`."""
        taken = self._memory.take(kind, shape, dtype)
        self._taken.append(taken)
        return taken

    def add(self, kernel: int, operands: NDArray[np.int64], chunks: int) -> None:
        """Note a call with the operands as they are now."""
        copied = operands.copy()
        self._operands.append(copied)
        self._calls.append((kernel, int(copied.ctypes.data), chunks))

    def table(self) -> NDArray[np.int64]:
        """The calls, `[calls, CALL_WORDS]`."""
        if len(self._table) != len(self._calls):
            self._table = np.array(self._calls, dtype=np.int64)
        return self._table
