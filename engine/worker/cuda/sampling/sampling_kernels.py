"""Temperature, filters and draws for many rows at once, without the host hearing of anything.

What is kept and drawn is what `engine.worker.sampling.filters` says, row by row: there by sorting,
here by bisection of the weights' bits, since the bits of numbers that are not negative order them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from engine.step import SamplingParams

RUN = 512  # ids per partial sum, as in `engine.worker.sampling.filters`
MOST_SORTED = 1024  # more of the largest than these are found by bisection
FLOAT_BITS = 31  # of a float32 that is not negative
ONE = 0x3F800000  # the bits of 1.0, the largest weight of each row

Put = Callable[[NDArray[Any]], Tensor]  # an array to where steps are computed, without waiting


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How rows are drawn, `[rows]` each; the last three tell the host what need not be done."""

    temperatures: Tensor  # float32
    min_ps: Tensor  # float32
    top_ks: Tensor  # int64, the whole vocabulary where there is no limit
    top_ps: Tensor  # float64
    points: Tensor  # float64, in [0, 1)
    has_min_p: bool
    most: int  # the largest limit of top-k, 0 if there is none
    has_top_p: bool

    @classmethod
    def of(
        cls, samplings: Sequence[SamplingParams], points: Sequence[float], vocab_size: int, put: Put
    ) -> Self:
        """One copy for all of them."""
        limits = [one.top_k if 0 < one.top_k < vocab_size else 0 for one in samplings]
        rows = [
            (one.temperature, one.min_p, limit or vocab_size, one.top_p, point)
            for one, limit, point in zip(samplings, limits, points, strict=True)
        ]
        columns = put(np.array(rows, dtype=np.float64).T.copy())
        temperatures, min_ps, top_ks, top_ps, there = columns.unbind()
        return cls(
            temperatures.float(),
            min_ps.float(),
            top_ks.long(),
            top_ps,
            there,
            has_min_p=any(one.min_p > 0 for one in samplings),
            most=max(limits),
            has_top_p=any(one.top_p < 1 for one in samplings),
        )


def sample(logits: Tensor, wishes: SamplingTensors) -> Tensor:
    """An id for each row of `[rows, vocab]` float32; some id where a row has no finite largest."""
    weights = probabilities(logits, wishes)
    return pick(weights, wishes.points).clamp_(max=logits.shape[1] - 1)


def probabilities(logits: Tensor, wishes: SamplingTensors) -> Tensor:
    """Unnormalised probabilities after temperature and filters; the largest of each row is 1.

    `[rows, vocab rounded up to whole runs]`; ids beyond the vocabulary have none.
    """
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / wishes.temperatures[:, None]
    weights = F.pad(scaled.exp_(), (0, -scaled.shape[1] % RUN))
    if wishes.has_min_p:
        weights.masked_fill_(weights < wishes.min_ps[:, None], 0)
    if wishes.most:
        weights.masked_fill_(weights < _smallest_of_top(weights, wishes)[:, None], 0)
    if wishes.has_top_p:
        _keep_nucleus(weights, wishes.top_ps)
    return weights


def pick(weights: Tensor, points: Tensor) -> Tensor:
    """The ids at which cumulative weights pass `points` of the totals; see `filters.pick`."""
    rows, width = weights.shape
    pieces = weights.view(rows, width // RUN, RUN)
    runs = pieces.sum(dim=2, dtype=torch.float64)
    ends = runs.cumsum(dim=1)
    target = (points * ends[:, -1])[:, None]
    run = torch.minimum(torch.searchsorted(ends, target, right=True), _last(runs > 0))
    piece = pieces.gather(1, run[:, :, None].expand(-1, -1, RUN))[:, 0]
    within = piece.cumsum(dim=1, dtype=torch.float64) + (ends - runs).gather(1, run)
    found = torch.searchsorted(within, target, right=True)
    places = torch.arange(RUN, device=weights.device)
    return run[:, 0] * RUN + _last((piece > 0) & (places <= found))[:, 0]


def _last(flags: Tensor) -> Tensor:
    """The last place of each row that is set, `[rows, 1]`; 0 if none is."""
    places = torch.arange(flags.shape[1], device=flags.device)
    return (flags * places).amax(dim=1, keepdim=True)


def _smallest_of_top(weights: Tensor, wishes: SamplingTensors) -> Tensor:
    """The least weight that top-k keeps in each row, 0 where it is not asked for."""
    width = weights.shape[1]
    if wishes.most > MOST_SORTED:
        bits = _bisect(weights, lambda over: over.sum(dim=1) >= wishes.top_ks)
        return bits.to(torch.int32).view(torch.float32)
    best = weights.topk(min(wishes.most, width), dim=1).values
    asked = wishes.top_ks <= wishes.most
    places = (wishes.top_ks.clamp(max=wishes.most) - 1)[:, None]
    return best.gather(1, places)[:, 0].where(asked, 0)


def _keep_nucleus(weights: Tensor, top_ps: Tensor) -> None:
    """Zero all but the fewest of the largest whose mass reaches top-p; lowest ids on ties."""

    def mass(over: Tensor) -> Tensor:
        return weights.where(over, 0).sum(dim=1, dtype=torch.float64)

    wanted = top_ps * weights.sum(dim=1, dtype=torch.float64)
    border = _bisect(weights, lambda over: mass(over) >= wanted).clamp_(max=ONE)
    bits = weights.view(torch.int32)
    is_border = bits == border[:, None]
    above = mass(bits > border[:, None])
    each = border.to(torch.int32).view(torch.float32).double()
    before = above[:, None] + _count_before(is_border) * each[:, None]
    is_first = before == above[:, None]
    drop = (bits < border[:, None]) | (is_border & ~is_first & (before >= wanted[:, None]))
    weights.masked_fill_(drop & (top_ps < 1)[:, None], 0)


def _count_before(flags: Tensor) -> Tensor:
    """How many are set to the left of each place; in two levels, since rows are long."""
    rows, width = flags.shape
    counts = flags.view(rows, width // RUN, RUN).to(torch.int32)
    within = counts.cumsum(dim=2, dtype=torch.int32)
    runs = within[:, :, -1]
    before = runs.cumsum(dim=1, dtype=torch.int32) - runs
    return (within - counts + before[:, :, None]).view(rows, width)


def _bisect(weights: Tensor, suffices: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest bits of each row such that the weights from there on suffice, int64 `[rows]`.

    `suffices` is asked of a mask of weights; what suffices does so with more weights too.
    """
    bits = weights.view(torch.int32)
    found = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    for place in reversed(range(FLOAT_BITS)):
        higher = found | (1 << place)
        found = higher.where(suffices(bits >= higher[:, None]), found)
    return found
