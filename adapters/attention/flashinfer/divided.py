"""Decodes of requests with unequal contexts, whose keys are divided into parts of equal length.

FlashInfer splits keys only while the requests alone do not fill the GPU (`disables_splits`): beyond
that a thread block reads all keys of a request, and the longest request keeps the others waiting.
Here each part is a request of its own to FlashInfer, over a run of the request's pages, and a row
of q is repeated for each of its parts. A kernel adds up what they found. The number of parts is
twice that of rows, so that no part is longer than a row's mean, and unused ones are empty.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapters.attention.flashinfer.launches import (
    BLOCKS_PER_PROCESSOR,
    CapturedLaunch,
    Geometry,
    Sinks,
)
from adapters.attention.flashinfer.ports import Library, MergeParts
from adapters.attention.flashinfer.tables import PARTS_PER_ROW, PageTableArena, PageTables
from engine.worker.ports import Int32s, Int64s

# Keys that make up for the launches which repeat q and add up the parts, as far as bytes can tell:
# a block reads about 80 GB/s, and so many keys of 128 dimensions in 13 µs
MIN_TOKENS_SAVED = 2048
# The keys of the longest request, over those that each thread block would read of equal ones
MIN_RATIO = 2.0


class Parts(NamedTuple):
    """The page tables of parts, the row of each, and the first part of each row."""

    tables: PageTables
    rows: Int64s  # [parts]
    first: Int32s  # [rows + 1]

    @classmethod
    def of(cls, tables: PageTables, page_size: int) -> "Parts":
        """Runs of whole pages, in the order of rows."""
        size = len(tables.kv_len)
        pages = np.diff(tables.kv_indptr)
        length = max(1, -(-tables.num_pages // size))
        counts = -(-pages // length)
        first = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        rows = np.repeat(np.arange(size, dtype=np.int64), counts)
        place = np.arange(first[-1], dtype=np.int32) - first[rows]
        ends = np.minimum(tables.kv_indptr[rows] + (place + 1) * length, tables.kv_indptr[rows + 1])
        indptr = np.concatenate(([0], ends)).astype(np.int32)
        last = np.full(len(rows), page_size, dtype=np.int32)
        last[first[1:] - 1] = tables.kv_last_page_len
        lengths = ((np.diff(indptr) - 1) * page_size + last).astype(np.int32)
        found = PageTables(np.arange(len(rows) + 1, dtype=np.int32), indptr, lengths, last)
        count = PARTS_PER_ROW * size
        return cls(found.widened(count), np.pad(rows, (0, count - len(rows))), first)


def is_uneven(lengths: Int32s, num_kv_heads: int, num_processors: int) -> bool:
    """Whether decodes of so many tokens take as long as the longest one, and by how much."""
    blocks = BLOCKS_PER_PROCESSOR * num_processors
    even = max(float(lengths.sum()) * num_kv_heads / blocks, float(lengths.mean()))
    longest = float(lengths.max())
    return longest > MIN_RATIO * even and longest - even >= MIN_TOKENS_SAVED


class DividedLaunch:
    """Attention of a fixed number of decodes, for capture in a CUDA graph."""

    takes_contiguous = False

    def __init__(
        self,
        geometry: Geometry,
        launch: CapturedLaunch,
        merge: MergeParts,
        library: Library,
        size: int,
    ) -> None:
        """`launch` is that of the parts of `size` rows."""
        self._geometry = geometry
        self._launch = launch
        self._merge = merge
        self._library = library
        self._rows = library.on_device(PARTS_PER_ROW * size, torch.int64)
        self._first = library.on_device(size + 1, torch.int32)

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        parts = Parts.of(tables, self._geometry.page_size)
        self._library.copy(self._rows, arena.put(parts.rows))
        self._library.copy(self._first, arena.put(parts.first))
        self._launch.plan(arena, parts.tables, indices)

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        repeated = q.index_select(0, self._rows)
        found = torch.empty_like(repeated)
        sums = torch.empty(repeated.shape[:2], dtype=torch.float32, device=q.device)
        self._geometry.run(self._launch.wrapper, repeated, pages, found, sums)
        scores = None if sinks is None else sinks.scores
        self._merge(found, sums, self._first, out, scores)

    def baked(self, library: Library) -> tuple[int, ...]:
        return self._launch.baked(library)
