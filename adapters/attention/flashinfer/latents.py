"""Attention to latent vectors (MLA) by FlashInfer, in and outside of CUDA graphs.

The vectors of a page are read as two views: k with RoPE, and the latent vector behind it. A plan
divides long requests among all thread blocks, so that nothing else has to.

What `BatchMLAPagedAttentionWrapper` plans and runs is called without it: for CUDA graphs it keeps
16 MiB for each size and copies 8 of them at each plan. Its module fills one workspace here, which
all steps share: a plan is copied in the stream, behind all layers that read the one before, from
the arena of its step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.attention.flashinfer.fit import LATENT_TILE
from adapters.attention.flashinfer.launches import Geometry, GraphLaunch, Launch, Sinks
from adapters.attention.flashinfer.ports import LatentKernels, Library
from adapters.attention.flashinfer.tables import PageTableArena, PageTables, TableSizes
from engine.errors import StartupError
from engine.worker.ports import StepLimits

CAUSAL = 1  # FlashInfer's number of the mask
MAX_PIECES = 16384  # a plan with more would be written behind its tables
PLAN_BYTES = 1 << 20  # nine tables of so many pieces, and five of multiprocessors
SLACK = 256  # bytes for alignment


class LatentWorkspaces:
    """What all plans of a worker write to, and the kernels."""

    def __init__(
        self, library: Library, geometry: Geometry, sizes: TableSizes, limits: StepLimits
    ) -> None:
        """Raises `StartupError` naming the limits that are too large."""
        heads, processors = geometry.num_heads, library.num_processors
        check_pieces(most_pieces(heads, sizes, processors), heads, limits)
        row_bytes = geometry.value_dim * geometry.spec.dtype.itemsize + torch.float32.itemsize
        parts = processors * LATENT_TILE * row_bytes + SLACK  # each divides two tiles
        self.kernels: LatentKernels = library.latents(geometry.spec.dtype)
        self.indices = library.on_device(sizes.pages + sizes.rows, torch.int32)
        self.parts = library.on_device(parts, torch.uint8)
        self.cuts = library.on_device(PLAN_BYTES, torch.uint8)


class LatentLaunch:
    """Attention of requests with any number of new tokens, in a CUDA graph or outside of one.

    FlashInfer chooses the tile by the mean number of new tokens. In a graph a step has as many
    requests as rows, empty ones among them, and so always the same tile.
    """

    def __init__(self, geometry: Geometry, work: LatentWorkspaces, *, is_captured: bool) -> None:
        self._geometry = geometry
        self._work = work
        self._is_captured = is_captured
        self._indices = work.indices
        self._planned: Sequence[int] = ()  # the current step's, set by `plan`

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        work, geometry = self._work, self._geometry
        if self._is_captured:
            tables = tables.widened(tables.num_rows)
        self._planned = work.kernels.plan(
            work.parts,
            work.cuts,
            arena.take(PLAN_BYTES),
            arena.put(tables.qo_indptr),
            arena.put(tables.kv_indptr),
            arena.put(tables.kv_len),
            geometry.num_heads,
            geometry.value_dim,
            True,
        )
        self._indices = indices

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        work, spec = self._work, self._geometry.spec
        keys, turned = pages[0][:, :, 0], spec.values_from
        work.kernels.run(
            work.parts,
            work.cuts,
            self._planned,
            q[..., turned:],
            q[..., :turned],
            keys[..., turned:],
            keys[..., :turned],
            self._indices,
            out,
            None,
            CAUSAL,
            self._geometry.num_heads,
            self._geometry.page_size,
            spec.scale,
            False,
            1.0,
            1.0,
            None,
        )

    def baked(self, library: Library) -> tuple[int, ...]:
        return tuple(int(each) for each in self._planned)


class LatentLaunches:
    """See `Launches`: one in graphs, whatever their size, and one outside of them."""

    def __init__(
        self, library: Library, geometry: Geometry, sizes: TableSizes, limits: StepLimits
    ) -> None:
        """Raises `StartupError` naming the limits that are too large."""
        work = LatentWorkspaces(library, geometry, sizes, limits)
        self.indices = work.indices
        self.mixed: Launch = LatentLaunch(geometry, work, is_captured=False)
        self.decodes: Launch = self.mixed
        self._captured = LatentLaunch(geometry, work, is_captured=True)

    def captured(self, size: int, *, is_mixed: bool) -> GraphLaunch:
        """The launch of all graphs."""
        return self._captured


def most_pieces(heads: int, sizes: TableSizes, num_processors: int) -> int:
    """The most pieces of a plan: a tile each, and one more for each multiprocessor, among which
    the keys of long requests are divided."""
    tiles = max(sizes.tokens * heads // LATENT_TILE, 2 * sizes.rows) + sizes.rows
    return tiles + num_processors


def check_pieces(pieces: int, heads: int, limits: StepLimits) -> None:
    """Raise `StartupError` if a step may have more pieces than a plan has room for."""
    if pieces > MAX_PIECES:
        raise StartupError(
            f"max_batch_tokens={limits.max_tokens} and max_batch_size={limits.max_requests} need "
            f"plans of {pieces:,} pieces with {heads} heads; attention to latent vectors takes at "
            f"most {MAX_PIECES:,} on a GPU"
        )
