"""Memory for packed weights, in few large mappings."""

import mmap
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from engine.worker.weights.packed_file import anonymous

SLAB_BYTES = 64 << 20
ALIGNMENT = 64


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
