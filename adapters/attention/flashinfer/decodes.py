"""Attention of decodes by our Triton kernel, in and outside of CUDA graphs.

A thread block of each KV head reads a run of a row's keys. Where rows alone do not fill the GPU, or
where one request is much longer than the others and would keep them waiting, the keys of long
requests are divided into several runs, whose results a second kernel adds up. Which tokens a run
has is planned once a step; a graph holds as many runs as any plan needs, of which some are empty.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapters.attention.flashinfer.launches import BLOCKS_PER_PROCESSOR, Geometry, Sinks
from adapters.attention.flashinfer.ports import DecodeKernels, Library
from adapters.attention.flashinfer.tables import ALIGN, PageTableArena, PageTables
from engine.worker.cuda.kernels.reference import DecodeKeys, Scoring
from engine.worker.ports import Int32s

MIN_RUN = 64  # tokens; the kernel's largest tile


class Runs(NamedTuple):
    """The runs of a step, `DecodeKeys.runs`, and the first run of each row."""

    table: Int32s  # [runs, 4]
    first: Int32s  # [rows + 1]

    @classmethod
    def of(cls, tables: PageTables, window: int | None, count: int) -> "Runs":
        """The runs of a step, of each row equally long ones; `count` is more than that of rows.

        No run has more tokens than all rows divided by how many runs there are beyond the rows.
        Runs behind those of the last row are empty. With a window rows read their last tokens.
        """
        size, ends = len(tables.kv_len), tables.kv_len.astype(np.int64)
        starts = np.zeros(size, np.int64) if window is None else np.maximum(ends - window, 0)
        lengths = ends - starts
        most = max(MIN_RUN, -(-int(lengths.sum()) // (count - size)))
        counts = np.maximum(1, -(-lengths // most))
        first = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(np.arange(size), counts)
        place, length, number = np.arange(first[-1]) - first[rows], lengths[rows], counts[rows]
        cuts = (starts[rows] + (place + after) * length // number for after in (0, 1))
        named = np.where(number > 1, ~rows, rows)
        found = np.zeros((count, 4), np.int32)
        found[: len(rows)] = np.stack((named, tables.kv_indptr[rows], *cuts), axis=1)
        return cls(found, first.astype(np.int32))


def num_runs(rows: int, num_kv_heads: int, num_processors: int) -> int:
    """The runs of so many rows: one each, and as many as fill the GPU."""
    return rows + -(-BLOCKS_PER_PROCESSOR * num_processors // num_kv_heads)


def plan_bytes(rows: int, num_kv_heads: int, library: Library) -> int:
    """Bytes of a plan of up to so many rows, with what aligns them."""
    return 4 * (4 * num_runs(rows, num_kv_heads, library.num_processors) + rows + 1) + 2 * ALIGN


class DecodeLaunch:
    """Attention of decodes, in a CUDA graph of `rows` of them or, eagerly, of up to so many."""

    def __init__(
        self, geometry: Geometry, library: Library, kernels: DecodeKernels, rows: int
    ) -> None:
        self._geometry = geometry
        self._library = library
        self._kernels = kernels
        self._table = library.on_device(4 * self._num_runs(rows), torch.int32)
        self._first = library.on_device(rows + 1, torch.int32)
        spec = geometry.spec
        scales = (spec.k_scale, spec.v_scale) if geometry.is_scaled else (1.0, 1.0)
        self._scoring = Scoring(spec.scale, spec.soft_cap, *scales)
        self._read = DecodeKeys(self._table, self._table)  # the current step's, set by `plan`

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        rows = len(tables.kv_len)
        runs = Runs.of(tables, self._geometry.spec.window, self._num_runs(rows))
        table = self._table[: runs.table.size]
        self._library.copy(table, arena.put(runs.table.reshape(-1)))
        self._library.copy(self._first[: rows + 1], arena.put(runs.first))
        self._read = DecodeKeys(table.view(-1, 4), indices)

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        scores = None if sinks is None else sinks.scores
        sizes = len(self._read.runs), *q.shape[1:]
        found = torch.empty(sizes, dtype=torch.float32, device=q.device)
        sums = torch.empty(sizes[:2], dtype=torch.float32, device=q.device)
        self._kernels.attend(q, *pages, self._read, out, (found, sums), self._scoring, scores)
        self._kernels.merge(found, sums, self._first[: len(q) + 1], out, scores)

    def baked(self, library: Library) -> tuple[int, ...]:
        """A graph contains no numbers of a plan."""
        return ()

    def _num_runs(self, rows: int) -> int:
        heads, processors = self._geometry.spec.num_kv_heads, self._library.num_processors
        return num_runs(rows, heads, processors)
