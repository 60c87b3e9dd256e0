"""Memory for weights that the system may back with huge pages.

Reading all weights once a token touches half a million small pages a gigabyte or two; with huge
pages the same read is faster by a tenth or more. Only a hint: where it is not taken, nothing is
lost.
"""

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20
ALIGNMENT = 64


class Pages:
    """Hands out pieces of large anonymous mappings; each lives as long as its use."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose elements have no value yet."""
        num_bytes = dtype.itemsize * prod(shape)
        if self._used + num_bytes > len(self._slab):
            # Private: by default mappings are shared, and those seldom get huge pages.
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mapping = mmap.mmap(-1, max(SLAB_BYTES, num_bytes), kind)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            self._slab = torch.frombuffer(mapping, dtype=torch.uint8)
            self._used = 0
        taken = self._slab[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return taken.view(dtype).view(*shape)
