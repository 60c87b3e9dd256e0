"""The filters and sampling of one row in numpy: the definition that all devices follow.

`tests/contracts/test_sampling.py` compares the native and torch kernels with this module.

Log-probabilities of tokens under the model's own distribution, in float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.step import SamplingParams, TokenLogprobs

Floats = NDArray[np.float32]

_RUN = 512  # ids per partial sum of the cumulative distribution


def probabilities(logits: Floats, sampling: SamplingParams) -> Floats:
    """Unnormalised probabilities `[vocab]` after temperature and filters; the largest is 1.

    min-p keeps ids of at least `min_p` times the largest; top-k the k largest and their equals;
    top-p the fewest of the largest, of what is left, that reach `top_p` (lowest ids on ties).
    """
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    weights: Floats = np.exp(scaled)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.partition(weights, -sampling.top_k)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        _keep_nucleus(weights, sampling.top_p)
    return weights


def _keep_nucleus(weights: Floats, top_p: float) -> None:
    """Zero what lies outside the nucleus, without sorting what cannot decide it.

    Weights are non-negative floats, so their high bits order them: sum the mass per bucket of
    the high 16 bits, find the bucket in which `top_p` is reached, and sort that one only.
    """
    bucket = weights.view(np.uint32) >> 16
    mass = np.bincount(bucket, weights=weights)
    above = np.cumsum(mass[::-1])[::-1]  # mass of this bucket and all above
    wanted = top_p * above[0]
    border = int(np.flatnonzero(above >= wanted)[-1])
    ids = np.flatnonzero(bucket == border)
    order = ids[np.argsort(-weights[ids], kind="stable")]
    before = np.cumsum(weights[order], dtype=np.float64) - weights[order]
    before += above[border + 1] if border + 1 < len(above) else 0.0
    weights[bucket < border] = 0
    outside = before >= wanted
    outside[0] = False
    weights[order[outside]] = 0


def pick(weights: Floats, point: float) -> int:
    """The id at which the cumulative weight passes `point` (in [0, 1)) of the total."""
    runs = np.add.reduceat(weights, np.arange(0, len(weights), _RUN), dtype=np.float64)
    ends = np.cumsum(runs)
    target = point * ends[-1]
    run = int(np.searchsorted(ends, target, side="right"))
    start = run * _RUN
    within = np.cumsum(weights[start : start + _RUN], dtype=np.float64)
    within += ends[run] - runs[run]
    found = start + int(np.searchsorted(within, target, side="right"))
    while found >= len(weights) or weights[found] == 0:  # rounding at the end of a run
        found -= 1
    return found


class RowLogprobs(NamedTuple):
    """Log-probabilities of one id per row and of the most likely ids, on the logits' device."""

    logprobs: Tensor  # [rows]
    ranks: Tensor  # [rows]
    top_ids: Tensor  # [rows, most]
    top_logprobs: Tensor  # [rows, most]
    are_finite: Tensor  # [rows], whether the row has neither NaN nor infinity


def row_logprobs(logits: Tensor, ids: Tensor, most: int) -> RowLogprobs:
    """Log-probabilities of `ids[i]` in row i of `[rows, vocab]`, and of the `most` most likely ids.

    The order of equally likely ids is not defined.
    """
    total = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, ids[:, None])
    best = logits.topk(min(most, logits.shape[1]), dim=-1)
    return RowLogprobs(
        chosen[:, 0] - total,
        (logits > chosen).sum(dim=-1) + 1,
        best.indices,
        best.values - total[:, None],
        total.isfinite(),
    )


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the ids `[rows, most]` in each row of `[rows, vocab]`; NaN or infinity
    in a row whose logits are not finite."""
    return logits.gather(1, ids) - logits.logsumexp(dim=-1, keepdim=True)


def to_token_logprobs(found: RowLogprobs, tops: Sequence[int]) -> list[TokenLogprobs | None]:
    """The rows as Python numbers, with the `tops[i]` most likely ids of row i; None for a row with
    NaN."""
    return [
        TokenLogprobs(logprob, rank, tuple(zip(top_ids, top, strict=True))[:count])
        if is_fine
        else None
        for logprob, rank, top_ids, top, is_fine, count in zip(
            *(tensor.tolist() for tensor in found), tops, strict=True
        )
    ]
