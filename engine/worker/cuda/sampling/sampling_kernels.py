"""Temperature, filters and sampling for all rows at once on the device, without host
synchronisation.

The result equals `engine.worker.sampling.filters`, which sorts each row. Here thresholds are found
by bisection over the bits of the weights: the bit patterns of non-negative floats are ordered as
they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.model.torch_operators import TorchSampling
from engine.worker.ports import Draw
from engine.worker.sampling.logits_processors import Put

RUN = 512  # ids per partial sum, as in `engine.worker.sampling.filters`
MAX_SORTED = 1024  # a larger k is found by bisection
FLOAT_BITS = 31  # bits of a non-negative float32
ONE = 0x3F800000  # the bits of 1.0, the largest weight of each row

# logits, temperatures, min-ps, top-ks or None, top-ps or None, points -> ids; one launch
SampleKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters, `[rows]` each; the last three let the host skip unused filters."""

    temperatures: Tensor  # float32
    min_ps: Tensor  # float32
    top_ks: Tensor  # int64, the whole vocabulary where there is no limit
    top_ps: Tensor  # float64
    points: Tensor  # float64, in [0, 1)
    has_min_p: bool
    most: int  # the largest limit of top-k, 0 if there is none
    has_top_p: bool

    @classmethod
    def of(cls, draws: Sequence[Draw], vocab_size: int, put: Put) -> Self:
        """All parameters in one copy to the device."""
        samplings = [draw.sampling for draw in draws]
        limits = [one.top_k if 0 < one.top_k < vocab_size else 0 for one in samplings]
        rows = [
            (one.temperature, one.min_p, limit or vocab_size, one.top_p, draw.point)
            for draw, one, limit in zip(draws, samplings, limits, strict=True)
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


@dataclass(frozen=True, slots=True)
class DeviceSampling(TorchSampling):
    """Samples on the device; parameters get there by `put`, in one copy."""

    put: Put
    kernel: SampleKernel | None = None  # samples filtered rows in one launch

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        params = SamplingTensors.of(draws, logits.shape[1], self.put)
        if len(draws) < len(logits):
            rows = np.array([draw.row for draw in draws], dtype=np.int64)
            logits = logits.index_select(0, self.put(rows))
        return sample(logits, params, self.kernel)


def sample(logits: Tensor, params: SamplingTensors, kernel: SampleKernel | None = None) -> Tensor:
    """Sample an id for each row of `[rows, vocab]` float32; any id if a row has no finite
    maximum. Without the fused kernel, in plain torch."""
    if kernel is not None:
        top_ks = params.top_ks if params.most else None
        top_ps = params.top_ps if params.has_top_p else None
        return kernel(logits, params.temperatures, params.min_ps, top_ks, top_ps, params.points)
    weights = probabilities(logits, params)
    return pick(weights, params.points).clamp_(max=logits.shape[1] - 1)


def probabilities(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Unnormalised probabilities after temperature and filters; the largest of each row is 1.

    `[rows, vocab rounded up to whole runs]`; ids beyond the vocabulary have none.
    """
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / params.temperatures[:, None]
    weights = F.pad(scaled.exp_(), (0, -scaled.shape[1] % RUN))
    if params.has_min_p:
        weights.masked_fill_(weights < params.min_ps[:, None], 0)
    if params.most:
        weights.masked_fill_(weights < _smallest_of_top(weights, params)[:, None], 0)
    if params.has_top_p:
        _keep_nucleus(weights, params.top_ps)
    return weights


def pick(weights: Tensor, points: Tensor) -> Tensor:
    """Inverse transform sampling: the ids at which the cumulative weight passes `points` ×
    total."""
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
    """The last set column of each row, `[rows, 1]`; 0 if none is set."""
    places = torch.arange(flags.shape[1], device=flags.device)
    return (flags * places).amax(dim=1, keepdim=True)


def _smallest_of_top(weights: Tensor, params: SamplingTensors) -> Tensor:
    """The smallest weight that top-k keeps in each row; 0 in rows without top-k."""
    width = weights.shape[1]
    if params.most > MAX_SORTED:
        bits = _bisect(weights, lambda over: over.sum(dim=1) >= params.top_ks)
        return bits.to(torch.int32).view(torch.float32)
    best = weights.topk(min(params.most, width), dim=1).values
    asked = params.top_ks <= params.most
    places = (params.top_ks.clamp(max=params.most) - 1)[:, None]
    return best.gather(1, places)[:, 0].where(asked, 0)


def _keep_nucleus(weights: Tensor, top_ps: Tensor) -> None:
    """Keep the smallest set of largest weights whose mass reaches top-p; lowest ids first on
    ties."""

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
    """The number of set columns before each column; in two levels, since rows are long."""
    rows, width = flags.shape
    counts = flags.view(rows, width // RUN, RUN).to(torch.int32)
    within = counts.cumsum(dim=2, dtype=torch.int32)
    runs = within[:, :, -1]
    before = runs.cumsum(dim=1, dtype=torch.int32) - runs
    return (within - counts + before[:, :, None]).view(rows, width)


def _bisect(weights: Tensor, suffices: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest threshold (as bits) of each row whose weights at or above it suffice, int64
    `[rows]`.

    `suffices` maps a mask of weights to a boolean per row and is monotone in the mask.
    """
    bits = weights.view(torch.int32)
    found = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    for place in reversed(range(FLOAT_BITS)):
        higher = found | (1 << place)
        found = higher.where(suffices(bits >= higher[:, None]), found)
    return found
