"""Decodes by a kernel that packs the query heads of a KV head into one tile (FlashInfer's XQA).

The kernel has no plan: it reads a dense page table `[rows, pages of the longest request]` and the
lengths on the device. How it splits keys depends on the number of rows and on the table's width, so
that a CUDA graph stays valid while requests grow.
"""

import numpy as np
import torch
from torch import Tensor

from adapters.attention.flashinfer.launches import Geometry, Sinks
from adapters.attention.flashinfer.ports import Library, PackedDecode
from adapters.attention.flashinfer.tables import PageTableArena, PageTables, TableSizes
from engine.worker.ports import Int64s

SEMAPHORE_BYTES = 8 << 20  # at the start of the workspace
TILE = 64  # rows of a tile at most, unless a group has more heads
PADDING = 16  # floats beside the sums of a row: its largest score and its weight


def workspace_bytes(num_processors: int, group: int, head_dim: int) -> int:
    """Bytes for semaphores and partial results.

    Keys are split only while the thread blocks are at most as many as multiprocessors; each of them
    writes one tile of sums.
    """
    rows = 2 * num_processors * max(TILE, group)
    return SEMAPHORE_BYTES + rows * (head_dim + PADDING) * 4


class DenseTables:
    """Page tables and lengths at fixed addresses, for as many decodes as a step may have."""

    def __init__(self, library: Library, sizes: TableSizes) -> None:
        self._library = library
        self.width = sizes.pages // sizes.requests
        self._pages = library.on_device(sizes.pages, torch.int32)
        self._lengths = library.on_device(sizes.requests, torch.int32)
        self._places = library.on_device(sizes.pages, torch.int64)
        library.fill(self._pages, 0)  # unused entries are valid pages too

    def put(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        """Copy the tables of a step to the device; `indices` are its pages, int32 on the device."""
        places = dense_places(tables, self.width)
        on_device = self._places[: len(places)]
        self._library.copy(on_device, arena.put(places))
        self._library.scatter(self._pages, on_device, indices)
        rows = len(tables.kv_len)
        self._library.copy(self._lengths[:rows], arena.put(tables.kv_len))

    def pages(self, rows: int) -> Tensor:
        """`[rows, width]` int32."""
        return self._pages[: rows * self.width].view(rows, self.width)

    def lengths(self, rows: int) -> Tensor:
        """`[rows]` uint32."""
        return self._lengths[:rows].view(torch.uint32)


def dense_places(tables: PageTables, width: int) -> Int64s:
    """The place of each page of the requests in a dense table of `width` pages per request."""
    counts = np.diff(tables.kv_indptr)
    starts = np.arange(len(counts), dtype=np.int64) * width - tables.kv_indptr[:-1]
    return np.arange(tables.num_pages, dtype=np.int64) + np.repeat(starts, counts)


class PackedLaunch:
    """Attention of a fixed number of decodes by XQA, for capture in a CUDA graph."""

    takes_contiguous = True  # the kernel does not know strides of q

    def __init__(self, geometry: Geometry, kernel: PackedDecode, tables: DenseTables) -> None:
        self._geometry = geometry
        self._kernel = kernel
        self._tables = tables

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        """Copy the tables of one step; `indices` are the requests' pages, int32 on the device."""
        self._tables.put(arena, tables, indices)

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        """Attention of one layer into `out`; q `[rows, heads, dim]` is contiguous."""
        assert sinks is None, "this kernel is not used with sinks"
        geometry, rows = self._geometry, len(q)
        self._kernel(
            query=q,
            kv_cache=pages,
            block_tables=self._tables.pages(rows),
            seq_lens=self._tables.lengths(rows),
            max_seq_len=self._tables.width * geometry.page_size,
            bmm1_scale=geometry.spec.scale,
            bmm2_scale=1.0,
            window_left=geometry.window_left,
            out=out,
            kv_layout="NHD",
        )

    def baked(self, library: Library) -> tuple[int, ...]:
        """What a graph contains as a constant: the width of the page table."""
        return (self._tables.width,)
