"""Which kernel computes a product of few rows, measured once for each shape and GPU.

A decode step is as fast as its weights are read, and which kernel reads a weight fastest depends on
its shape: torch or one of the tilings of our own Triton kernel. The first start on a GPU measures
all of them and keeps the choice in a file of that GPU, so that later starts use the same kernels
and give the same bits.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.errors import KernelFaulted
from engine.worker.cuda.choice_file import ChoiceFile, KernelTrials
from engine.worker.cuda.kernels.tiling import Tiling

logger = logging.getLogger(__name__)

TORCH = "torch"
ROWS = (16, 64)  # a product uses the choice for the next of these; larger ones are torch's
MIN_GAIN = 0.02  # a tiling replaces torch if it takes less time by this share
# A measurement alternates between so many of one shape, so that none stays in cache
MAX_WEIGHTS = 8
REPEATS = 24

TILINGS = (
    Tiling(64, 64, 64, 1, 4, 5),
    Tiling(64, 128, 64, 1, 4, 4),
    Tiling(64, 64, 64, 4, 4, 5),
    Tiling(64, 128, 64, 4, 4, 4),
    Tiling(64, 64, 128, 2, 4, 4),
    Tiling(64, 64, 128, 8, 4, 4),
    Tiling(16, 64, 128, 1, 4, 4),
    Tiling(16, 64, 128, 4, 4, 4),
)
FIXED = Tiling(64, 128, 64, 1, 4, 4)  # the tiling of every product in batch-invariant mode
KNOWN = {str(tiling): tiling for tiling in TILINGS}

Product = Callable[[Tensor, Tensor, Tiling | str], object]  # x, weight; TORCH or tiling
Seconds = Callable[[Callable[[], object]], float]  # measures work on the device


class Shape(NamedTuple):
    """A product of up to `rows` rows with a weight `[outputs, width]`."""

    rows: int
    outputs: int
    width: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.outputs} x {self.width} {self.dtype}"


class ChoosesTiling(Protocol):
    """How linears find the kernel of a product."""

    def register(self, weight: Tensor) -> None:
        """Announce a weight `[outputs, width]` before any product with it."""
        ...

    def tiling(self, rows: int, weight: Tensor) -> Tiling | None:
        """The tiling of a product; None: torch."""
        ...


class FixedTiling:
    """One tiling for all products: a row's result does not depend on the other rows."""

    def register(self, weight: Tensor) -> None:
        """Nothing is measured."""

    def tiling(self, rows: int, weight: Tensor) -> Tiling | None:
        return FIXED


FIXED_TILING = FixedTiling()


class MeasuredTilings:
    """The fastest kernel of each shape, from the file of this GPU or measured."""

    def __init__(self, path: Path | None) -> None:
        """`path` is None where nothing is kept."""
        self._weights: dict[tuple[int, int, str], list[Tensor]] = {}
        self._chosen = ChoiceFile(path)

    def register(self, weight: Tensor) -> None:
        kept = self._weights.setdefault(_kind(weight), [])
        if len(kept) < MAX_WEIGHTS:
            kept.append(weight)

    def tiling(self, rows: int, weight: Tensor) -> Tiling | None:
        most = next((each for each in ROWS if rows <= each), None)
        return KNOWN.get(self._chosen.get(str(Shape(most, *_kind(weight))))) if most else None

    def measure(self, product: Product, seconds: Seconds, trials: KernelTrials) -> None:
        """Choose for each registered shape that the file lacks, and add it to the file.

        Raises `KernelFaulted`.
        """
        for kind, weights in self._weights.items():
            for rows in ROWS:
                shape = Shape(rows, *kind)
                if self._chosen.get(str(shape)) not in (TORCH, *KNOWN):
                    measured = functools.partial(_measured, product=product, seconds=seconds)
                    self._chosen.put(str(shape), _fastest(shape, weights, measured, trials))


def _fastest(
    shape: Shape,
    weights: Sequence[Tensor],
    measured: Callable[[Tensor, Sequence[Tensor], Tiling | str], float],
    trials: KernelTrials,
) -> str:
    x = weights[0].new_ones((shape.rows, shape.width))
    best, name = measured(x, weights, TORCH), TORCH
    limit = best * (1 - MIN_GAIN)
    for kernel in TILINGS:
        trial = f"product {kernel} of {shape}"
        if reason := trials.excluded(trial):
            logger.warning("GEMM kernel %s is not used: %s", kernel, reason)
            continue
        try:
            with trials.trial(trial, "--attention reference"):
                found = measured(x, weights, kernel)
        except KernelFaulted:
            raise
        except Exception as error:  # a compiler may raise anything; the others remain
            logger.warning("GEMM kernel %s is not used: %s", kernel, str(error).split("\n")[0])
            continue
        if found < min(best, limit):
            best, name = found, str(kernel)
    logger.info("GEMM of %s: %s, %.1f us", shape, name, best * 1e6)
    return name


def _measured(
    x: Tensor,
    weights: Sequence[Tensor],
    kernel: Tiling | str,
    *,
    product: Product,
    seconds: Seconds,
) -> float:
    """Seconds of one product; the weights alternate, as in a model."""

    def run() -> None:
        for place in range(REPEATS):
            product(x, weights[place % len(weights)], kernel)

    product(x, weights[0], kernel)  # compiles
    return seconds(run) / REPEATS


def _kind(weight: Tensor) -> tuple[int, int, str]:
    return (*weight.shape, str(weight.dtype).removeprefix("torch."))
