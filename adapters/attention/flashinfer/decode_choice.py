"""Which kernel computes the decodes of each captured batch size, measured at the start.

FlashInfer has two: FA2, which plans a split of the keys for each step, and XQA, which packs the
query heads of a KV head. Which one reads KV faster depends on the heads and on the batch size. Both
are timed as CUDA graphs over the real cache, and the choice is kept in a file of the GPU, so that
later starts use the same kernels and give the same bits.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.errors import KernelFaulted, StartupError
from engine.worker.cuda.choice_file import ChoiceFile
from engine.worker.cuda.trials import KernelTrials

logger = logging.getLogger(__name__)

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
