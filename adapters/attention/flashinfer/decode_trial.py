"""Runs decodes over the cache before any request owns blocks, to compare FlashInfer's kernels."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from adapters.attention.flashinfer.decode_choice import CONTEXTS, Times
from adapters.attention.flashinfer.launches import Geometry, Launch
from adapters.attention.flashinfer.ports import Library
from adapters.attention.flashinfer.tables import PageTableArenas, PageTables
from engine.worker.cuda.kernels.library import WrongResult
from engine.worker.ports import Int32s, KVTensors, StepLimits

# A measurement reads the pages of so many layers in turn, so that none stays in the L2 cache
MAX_LAYERS = 8
REPEATS = 2
MAX_ERROR = 2e-2  # relative (L2), what rounding explains
VERIFIED_TOKENS = 100  # compared at most per request


class DecodeTrial:
    """Plans and runs launches of one stage on made-up requests."""

    def __init__(
        self,
        library: Library,
        geometry: Geometry,
        cache: KVTensors,
        arenas: PageTableArenas,
        limits: StepLimits,
    ) -> None:
        self._library = library
        self._geometry = geometry
        self._cache = cache
        self._pages = tuple(zip(cache.keys, cache.values, strict=True))
        self._arenas = arenas
        self._most = limits.max_model_len

    def verify(self, rows: int, fa2: Launch, xqa: Launch, indices: Tensor) -> None:
        """Raise `WrongResult` if the kernels differ by more than rounding; the cache is zero
        before and after."""
        lengths = 1 + np.arange(rows) * 37 % min(self._most, VERIFIED_TOKENS)
        tables, ids = trial_tables(lengths, self._cache.block_size, self._cache.num_blocks)
        pages, used = self._pages[0], int(ids.max()) + 1
        for part in pages:
            part[:used].normal_()
        q, found = self._q(rows), []
        for launch in (fa2, xqa):
            found.append(torch.empty_like(q))
            self._plan(launch, tables, ids, indices)
            launch.run(q, pages, found[-1])
        for part in pages:
            part[:used].zero_()
        error = float((found[1].float() - found[0].float()).norm() / found[0].float().norm())
        if not error < MAX_ERROR:
            raise WrongResult(f"relative error {error:.2g} against FA2")

    def times(self, rows: int, launch: Launch, indices: Tensor) -> Times:
        """Seconds of one layer at each of the contexts that the limits allow."""
        q = self._q(rows)
        out = torch.empty_like(q)
        layers = self._pages[:MAX_LAYERS]

        def run() -> None:
            for _ in range(REPEATS):
                for pages in layers:
                    launch.run(q, pages, out)

        seconds: dict[int, float] = {}
        for context in sorted({min(each, self._most) for each in CONTEXTS}):
            lengths = np.full(rows, context)
            tables, ids = trial_tables(lengths, self._cache.block_size, self._cache.num_blocks)
            self._plan(launch, tables, ids, indices)
            run()  # compiles
            seconds[context] = self._library.seconds(run) / REPEATS / len(layers)
        return Times(seconds)

    def _plan(self, launch: Launch, tables: PageTables, ids: Int32s, indices: Tensor) -> None:
        with self._arenas.next() as arena:
            on_device = indices[: len(ids)]
            self._library.copy(on_device, arena.put(ids))
            launch.plan(arena, tables, on_device)

    def _q(self, rows: int) -> Tensor:
        spec, place = self._geometry.spec, self._cache.keys[0].device
        made = torch.randn((rows, spec.num_heads, spec.head_dim), device=place)
        return made.to(spec.dtype)


def trial_tables(
    lengths: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]],
    page_size: int,
    num_blocks: int,
) -> tuple[PageTables, Int32s]:
    """Tables of decodes whose requests have so many tokens, and their pages, each a different one
    as far as there are so many."""
    kv_len = np.asarray(lengths, dtype=np.int32)
    counts = -(-kv_len // page_size)
    indptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    ids = (np.arange(indptr[-1]) % num_blocks).astype(np.int32)
    rows = np.arange(len(kv_len) + 1, dtype=np.int32)
    last = ((kv_len - 1) % page_size + 1).astype(np.int32)
    return PageTables(rows, indptr, kv_len, last), ids
