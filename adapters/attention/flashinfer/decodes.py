"""Attention of decodes by our Triton kernel, in and outside of CUDA graphs.

While rows alone fill the GPU, each has one run of keys, which one thread block of each KV head
reads. Where they do not, or where one request is much longer than the others and would keep them
waiting, the keys of long requests are divided into several runs, whose results a second kernel adds
up. Which tokens a run has is planned once a step; a graph holds as many runs as any plan needs.
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
# Keys that make up for the second kernel, as far as bytes can tell: a thread block reads about 80
# GB/s, and so many keys of 128 dimensions in 3 µs
MIN_TOKENS_SAVED = 512
# The keys of the longest request, over those that each thread block would read of equal ones
MIN_RATIO = 2.0


class Runs(NamedTuple):
    """The runs of a step, `DecodeKeys.runs`, and the first run of each row."""

    table: Int32s  # [runs, 4]
    first: Int32s  # [rows + 1]

    @classmethod
    def of(cls, tables: PageTables, window: int | None, count: int) -> "Runs":
        """The runs of a step, of each row equally long ones; one each if `count` is the number of
        rows. Runs behind those of the last row are empty. With a window rows read their last
        tokens."""
        size, ends = len(tables.kv_len), tables.kv_len.astype(np.int64)
        starts = np.zeros(size, np.int64) if window is None else np.maximum(ends - window, 0)
        lengths = ends - starts
        counts = np.ones(size, np.int64)
        if count > size:
            most = max(MIN_RUN, -(-int(lengths.sum()) // (count - size)))
            counts = np.maximum(1, -(-lengths // most))
        first = np.concatenate(([0], np.cumsum(counts)))
        rows = np.repeat(np.arange(size), counts)
        place = np.arange(first[-1]) - first[rows]
        length, number = lengths[rows], counts[rows]
        cuts = (starts[rows] + (place + after) * length // number for after in (0, 1))
        found = np.zeros((count, 4), np.int32)
        found[: len(rows)] = np.stack((rows, tables.kv_indptr[rows], *cuts), axis=1)
        return cls(found, first.astype(np.int32))


def is_uneven(lengths: Int32s, num_kv_heads: int, num_processors: int) -> bool:
    """Whether decodes of so many tokens take as long as the longest one, and by how much."""
    blocks = BLOCKS_PER_PROCESSOR * num_processors
    even = max(float(lengths.sum()) * num_kv_heads / blocks, float(lengths.mean()))
    longest = float(lengths.max())
    return longest > MIN_RATIO * even and longest - even >= MIN_TOKENS_SAVED


def divided_runs(rows: int, num_kv_heads: int, num_processors: int) -> int:
    """Runs of so many rows whose keys are divided: none is longer than the mean of what a thread
    block reads, or of a row."""
    blocks = BLOCKS_PER_PROCESSOR * num_processors
    return rows + max(rows, -(-blocks // num_kv_heads))


def plan_bytes(rows: int, num_kv_heads: int, library: Library) -> int:
    """Bytes of a plan of up to so many rows, with what aligns them."""
    return 4 * (4 * divided_runs(rows, num_kv_heads, library.num_processors) + rows + 1) + 2 * ALIGN


class DecodeLaunch:
    """Attention of decodes, in a CUDA graph of `rows` of them or, eagerly, of up to so many."""

    def __init__(
        self,
        geometry: Geometry,
        library: Library,
        kernels: DecodeKernels,
        rows: int,
        *,
        divides: bool | None,
    ) -> None:
        """`divides`: whether the keys of long requests are divided; None: in the steps whose rows
        do not fill the GPU."""
        self._geometry = geometry
        self._library = library
        self._kernels = kernels
        self._divides = divides
        self._table = library.on_device(4 * self._num_runs(rows, divides=True), torch.int32)
        self._first = library.on_device(rows + 1, torch.int32)
        spec = geometry.spec
        scales = (spec.k_scale, spec.v_scale) if geometry.is_scaled else (1.0, 1.0)
        self._scoring = Scoring(spec.scale, spec.soft_cap, *scales)
        self._read = DecodeKeys(self._table, self._table)  # the current step's, set by `plan`

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        rows, divides = len(tables.kv_len), self._divides
        if divides is None:
            divides = not self._geometry.disables_splits(rows, self._library.num_processors)
        count = self._num_runs(rows, divides=divides)
        runs = Runs.of(tables, self._geometry.spec.window, count)
        table = self._table[: 4 * count]
        self._library.copy(table, arena.put(runs.table.reshape(-1)))
        self._library.copy(self._first[: rows + 1], arena.put(runs.first))
        self._read = DecodeKeys(table.view(count, 4), indices)

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        scores = None if sinks is None else sinks.scores
        attend, merge = self._kernels
        sizes = len(self._read.runs), *q.shape[1:]
        if sizes[0] == len(q):
            attend(q, *pages, self._read, out, self._scoring, None, scores)
            return
        found = torch.empty(sizes, dtype=torch.float32, device=q.device)
        sums = torch.empty(sizes[:2], dtype=torch.float32, device=q.device)
        attend(q, *pages, self._read, found, self._scoring, sums, None)
        merge(found, sums, self._first[: len(q) + 1], out, scores)

    def _num_runs(self, rows: int, *, divides: bool) -> int:
        heads, processors = self._geometry.spec.num_kv_heads, self._library.num_processors
        return divided_runs(rows, heads, processors) if divides else rows

    def baked(self, library: Library) -> tuple[int, ...]:
        """A graph contains no numbers of a plan."""
        return ()
