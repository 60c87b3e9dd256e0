"""Which kernel computes the decodes of each captured batch size, measured at the start.

FlashInfer has two: FA2, which plans a split of the keys for each step, and XQA, which packs the
query heads of a KV head. Which one reads KV faster depends on the heads and on the batch size. Both
are timed as CUDA graphs over the real cache, and the choice is kept in a file of the GPU, so that
later starts use the same kernels and give the same bits.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adapters.attention.flashinfer.launches import Geometry, Launch
from adapters.attention.flashinfer.ports import Library
from adapters.attention.flashinfer.tables import PageTableArenas, PageTables
from engine.errors import KernelFaulted, StartupError
from engine.worker.cuda.choice_file import ChoiceFile, KernelTrials
from engine.worker.cuda.kernels.library import WrongResult
from engine.worker.ports import Int32s

logger = logging.getLogger(__name__)

Pages = Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer
FA2, XQA, AUTO = "fa2", "xqa", "auto"
MIN_GAIN = 0.02  # XQA replaces FA2 if it takes less time by this share
CONTEXTS = (1024, 4096)  # tokens of each request, at most the longest that is served


class Times(NamedTuple):
    """Seconds of one layer's attention, by the tokens of each request."""

    by_context: dict[int, float]

    def __str__(self) -> str:
        pairs = self.by_context.items()
        return ", ".join(f"{seconds * 1e6:.1f} us at {context:,}" for context, seconds in pairs)


class DecodeChoice:
    """The kernel of each batch size.

    `wanted` is FA2, XQA, or AUTO: the one that `measure` finds faster. `why_not` says why XQA
    cannot be used, empty if it can. `shape` names heads and dtypes in the log and in the file.
    """

    def __init__(
        self, wanted: str, why_not: str, shape: str, file: ChoiceFile, trials: KernelTrials
    ) -> None:
        """Raises `StartupError` if XQA is wanted and cannot be used."""
        if wanted == XQA and why_not:
            raise StartupError(f"attention 'flashinfer-xqa' cannot be used: {why_not}")
        self._unlogged = why_not if wanted == AUTO else ""
        self._wanted = FA2 if why_not else wanted
        self._is_verified = False
        self._shape = shape
        self._file = file
        self._trials = trials

    @property
    def may_use_xqa(self) -> bool:
        return self._wanted != FA2

    def of(self, rows: int, verify: Callable[[], None], measure: Callable[[str], Times]) -> str:
        """FA2 or XQA for `rows` decodes; `verify` raises if XQA does not compile or computes
        something else than FA2. Raises `KernelFaulted`."""
        if self._unlogged:
            logger.info("decode attention is FA2's: XQA cannot be used: %s", self._unlogged)
            self._unlogged = ""
        if self._wanted == FA2:
            return FA2
        if reason := self._trials.excluded(XQA):
            return self._give_up(reason)
        try:
            with self._trials.trial(XQA, "--attention flashinfer-fa2"):
                if not self._is_verified:
                    logger.info(
                        "decode attention: comparing XQA with FA2; its first start compiles it"
                    )
                    verify()
                    self._is_verified = True
                return XQA if self._wanted == XQA else self._measured(rows, measure)
        except KernelFaulted:
            raise
        except Exception as error:  # a compiler may raise anything; FA2 remains
            line = next(iter(str(error).splitlines()), "") or type(error).__name__
            return self._give_up(line, error)

    def _give_up(self, reason: str, error: Exception | None = None) -> str:
        """FA2 for this and all other sizes; raises `StartupError` if XQA was asked for."""
        if self._wanted == XQA:
            raise StartupError(f"attention 'flashinfer-xqa' cannot be used: {reason}") from error
        logger.warning("decode attention is FA2's: XQA failed: %s", reason)
        self._wanted = FA2
        return FA2

    def _measured(self, rows: int, measure: Callable[[str], Times]) -> str:
        key = f"{rows} decodes, {self._shape}"
        kept = self._file.get(key)
        if kept in (FA2, XQA):
            return kept
        times = {name: measure(name) for name in (FA2, XQA)}
        chosen = faster(times)
        logger.info(
            "decode attention of %s: %s (a layer takes fa2 %s; xqa %s)",
            key,
            chosen,
            times[FA2],
            times[XQA],
        )
        self._file.put(key, chosen)
        return chosen


def faster(times: Mapping[str, Times]) -> str:
    """XQA if its times relative to FA2's are lower by `MIN_GAIN` on average, else FA2."""
    xqa, fa2 = times[XQA].by_context, times[FA2].by_context
    shares = [xqa[context] / fa2[context] for context in fa2]
    return XQA if sum(shares) / len(shares) < 1 - MIN_GAIN else FA2


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
        pages: Pages,
        num_blocks: int,
        arenas: PageTableArenas,
    ) -> None:
        limits = geometry.spec.limits
        assert limits is not None, "attention on a GPU needs the step limits"
        self._library = library
        self._geometry = geometry
        self._pages = pages
        self._num_blocks = num_blocks
        self._arenas = arenas
        self._most = limits.max_model_len

    def verify(self, rows: int, fa2: Launch, xqa: Launch, indices: Tensor) -> None:
        """Raise `WrongResult` if the kernels differ by more than rounding; the cache is zero
        before and after."""
        lengths = 1 + np.arange(rows) * 37 % min(self._most, VERIFIED_TOKENS)
        tables, ids = trial_tables(lengths, self._geometry.page_size, self._num_blocks)
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
            tables, ids = trial_tables(lengths, self._geometry.page_size, self._num_blocks)
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
        spec, place = self._geometry.spec, self._pages[0][0].device
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
