"""Memory for weights, in few large mappings.

Not on huge pages: a lone decode step of 494 M parameters took 75 to 82 ms without and 75 to 90 with
them, and in a virtual machine whose host takes free ones back, touching them costs seconds a GiB.
"""

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20
ALIGNMENT = 64


class WeightPages:
    """Hands out pieces of large anonymous mappings; each lives as long as its use."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose elements have no value yet."""
        num_bytes = dtype.itemsize * prod(shape)
        if self._used + num_bytes > len(self._slab):
            mapping = mmap.mmap(-1, max(SLAB_BYTES, num_bytes))
            self._slab = torch.frombuffer(mapping, dtype=torch.uint8)
            self._used = 0
        taken = self._slab[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return taken.view(dtype).view(*shape)
