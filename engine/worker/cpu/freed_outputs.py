"""Memory of kernels' outputs that are not in a recording, kept for the next ones.

The C library returns large blocks to the system when they are freed, and each page of a fresh one
costs a fault: on a virtual machine whose host takes back free memory a prompt of 4,096 tokens of
Qwen3.5-4B took 45 instead of 25 seconds.
"""

import weakref
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cpu.kernels.vectors import LINE

MIN_BYTES = 1 << 20  # fixed: below it the C library keeps blocks itself
KEPT_BYTES = 512 << 20  # fixed: outputs of 512 rows of the largest models


class FreedOutputs:
    """Blocks of powers of two, of which only what was written takes memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    @property
    def kept(self) -> int:
        """Bytes of free blocks."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, whose memory comes back when nothing refers to it."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return torch.empty(shape, dtype=dtype)
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        block = free.pop() if free else np.empty(size + LINE, dtype=np.uint8)
        start = -block.ctypes.data % LINE
        lent = block[start : start + num_bytes]
        weakref.finalize(lent, self._give_back, block, size).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _give_back(self, block: NDArray[np.uint8], size: int) -> None:
        if self.kept + size <= KEPT_BYTES:
            self._free[size].append(block)
