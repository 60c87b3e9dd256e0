"""Memory for packed weights, in few large mappings.

Huge pages are not requested: a single decode step of 494 M parameters took 75 to 82 ms without and
75 to 90 ms with them, and in a virtual machine whose host reclaims free ones, touching them takes
seconds per GiB.
"""

import mmap
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20
ALIGNMENT = 64


def anonymous(num_bytes: int) -> mmap.mmap:
    """A new mapping of so many bytes."""
    return mmap.mmap(-1, num_bytes)


class WeightPages:
    """Allocates tensors from large mappings; a mapping lives as long as its tensors."""

    def __init__(
        self,
        new_mapping: Callable[[int], mmap.mmap] = anonymous,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """`new_mapping` maps so many bytes, at least `slab_bytes` each time."""
        self._new_mapping = new_mapping
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor, aligned to a cache line."""
        num_bytes = dtype.itemsize * prod(shape)
        if self._used + num_bytes > len(self._slab):
            mapping = self._new_mapping(max(self._slab_bytes, num_bytes))
            self._slab = torch.frombuffer(mapping, dtype=torch.uint8)
            self._used = 0
        taken = self._slab[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return taken.view(dtype).view(*shape)
