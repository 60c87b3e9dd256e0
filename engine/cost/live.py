"""A cost model that is refined while serving, without being misled by single slow iterations.

The calibration is multiplied by factors: one for each point of its curve, and one for each of the
coefficients of attention, sampling and pieces. An iteration adjusts the two points around its
number of tokens, and the coefficients, each in proportion to the seconds that it contributes
(normalized least mean squares). So drift is followed, and an error that grows with the context is
corrected where it comes from. An error that differs from the median of the last iterations of that
size by more than `SMALL_ERROR` is replaced by the median: a stall of one or two iterations changes
nothing. Since larger iterations never take less time, points below are lowered and points above are
raised to keep the curve ascending.

A factor that no iteration tells anything of, because its size has not been used yet or not for
`RECENT` iterations, follows the iterations that run: what makes all of them ten times slower than
calibrated, such as other work on the machine or a calibration that was measured beside it, does so
at other sizes too. So no estimate stays wrong because it keeps its size from being used.

Iterations of decodes only are also followed apart from all others, by one factor on the calibrated
model: the median of the last of them. Beside slices of an image encoder they take longer, since
the slices take caches and memory from them: so these only lower it, or longer iterations would lead
to longer ones.

Factors cannot make something of a coefficient that is 0, nor tell what any piece of a prompt costs
from what its tokens cost while all pieces have one length. So in place of `UNMEASURED`, which is
the model of a machine that was not measured, one is fitted to the last iterations with pieces and
the last ones without, after `FIRST_FIT` iterations and then after each quarter more of them
(results/learned_cost).

While the iterations of a size take as long as predicted on average, only every eighth of them is
looked at: learning takes as much of the event loop's time as planning an iteration.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from engine.cost.fit import Sample, fit
from engine.cost.model import UNMEASURED, CostModel, StepCounts, StepParts
from engine.step import Step

# Swept in results/constants
NEWS_SHARE = 0.1  # the latest measurement's weight in the moving averages of the control plane
WEIGHT = 0.05  # the latest iteration's weight in what is learned here
DECODES = 32  # iterations of decodes only whose median factor counts
WINDOW = 5  # iterations of a size whose median error counts
MAX_ERROR = 4.0  # the largest factor between measured and predicted seconds that is learned from
SMALL_ERROR = 0.25  # the error of a right prediction; larger ones are corrected faster
FASTER = 4.0  # by this factor
MIN_SHARE = 0.05  # a part with this share of an iteration's seconds is corrected by them
SETTLING = 20  # right predictions in a row, after which
SETTLED_ERROR = 0.02  # a size is settled, if their mean error is below this
REST = 7  # iterations of a settled size that are not learned from, after each that is
FIRST_FIT = 64  # iterations on a machine that was not measured, after which a model is fitted
FITS_APART = 4  # and again after a quarter more
RECENT = 256  # steps: what was learned from earlier ones is forgotten
MAX_MARGIN = 1.5  # a busy machine must not halve the bound of a step again and again
QUANTILE = 0.9


class ErrorSummary(NamedTuple):
    """Relative errors |measured / predicted - 1| of some steps, and the number of steps."""

    num_steps: int
    median: float
    p90: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> "ErrorSummary | None":
        """None if there are no errors."""
        ordered = sorted(errors)
        if not ordered:
            return None
        return cls(len(ordered), quantile(ordered, 0.5), quantile(ordered, QUANTILE))

    def __str__(self) -> str:
        return f"median {self.median:.1%}, p90 {self.p90:.1%} of {self.num_steps} iterations"


class PredictionErrors:
    """The ratios of measured to predicted seconds of the last `RECENT` steps.

    `margin` is the ratio that nine of ten steps stay below, from 1 to `MAX_MARGIN`: a step that is
    predicted to take `bound / margin` seconds keeps the bound nine times out of ten.
    """

    def __init__(self) -> None:
        self.margin = 1.0
        self._ratios: deque[float] = deque(maxlen=RECENT)

    def observe(self, ratio: float) -> None:
        """A step took `ratio` times as long as predicted."""
        self._ratios.append(ratio)
        self.margin = min(max(1.0, quantile(sorted(self._ratios), QUANTILE)), MAX_MARGIN)

    def summary(self) -> ErrorSummary | None:
        """None before the first step."""
        return ErrorSummary.of([abs(ratio - 1.0) for ratio in self._ratios])


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class LiveCost:
    """A `Cost` that learns from iterations. `model` is its present state."""

    def __init__(self, model: CostModel) -> None:
        self.errors = PredictionErrors()
        self.tokens_per_second = 1.0 / model.compute(1, 0)
        self._num_observed = 0
        self._next_fit = FIRST_FIT if replace(model, graphs=()) == UNMEASURED else 0
        # Iterations without pieces of prompts, and with them
        self._kept: list[deque[tuple[StepCounts, float]]] = [deque(maxlen=RECENT) for _ in range(2)]
        self._begin(model)

    def _begin(self, model: CostModel) -> None:
        """Learn from here on what differs from this model."""
        self.model = model
        self._start = model  # as calibrated
        self._sizes, self._calibrated = zip(*model.curve, strict=True)
        segments = range(len(model.curve) - 1)  # between two points
        self._ratios = [deque([1.0] * WINDOW, WINDOW) for _ in segments]
        # Measured to calibrated seconds
        self._slowdowns: list[deque[float]] = [deque(maxlen=FIRST_FIT) for _ in segments]
        # Of the points of the curve, then of the coefficients in the order of `StepParts`
        self._factors = [1.0] * (len(model.curve) + len(StepParts._fields) - 1)
        never = self._num_observed - RECENT - 1
        self._used_at = [never] * len(self._factors)  # by the number of observed iterations
        self._num_right = [0 for _ in segments]  # predictions in a row
        self._mean_errors = [0.0 for _ in segments]  # the mean errors of the last iterations
        self._rests = [0 for _ in segments]  # iterations that will not be learned from
        self._decode_ratios = deque([1.0], DECODES)  # measured to calibrated seconds
        self._decode_ratio: float | None = 1.0  # their median; None until it is asked for

    @property
    def margin(self) -> float:
        """The factor by which at most a tenth of the recent steps exceeded their prediction."""
        return self.errors.margin

    def compute(self, num_tokens: int, start: int) -> float:
        return self.model.compute(num_tokens, start)

    def step(self, step: Step) -> float:
        return self.model.step(step)

    def decodes(self, num_rows: int, num_slots: int) -> float:
        """Seconds of an iteration of `num_rows` decodes which read `num_slots` slots together, as
        the last iterations of decodes only took."""
        return self._decode_median() * self._start.decodes(num_rows, num_slots)

    def _decode_median(self) -> float:
        if self._decode_ratio is None:
            self._decode_ratio = median(self._decode_ratios)
        return self._decode_ratio

    def tokens_within(self, seconds: float, num_tokens: int, start: int, beside: int) -> int:
        """The tokens that fit, see `CostModel.tokens_within`."""
        return self.model.tokens_within(seconds, num_tokens, start, beside)

    def seconds_for(self, num_tokens: int) -> float:
        """Seconds to compute `num_tokens` waiting tokens at the recent rate."""
        return num_tokens / self.tokens_per_second

    @property
    def is_refuted(self) -> bool:
        """Whether nearly all of the last `FIRST_FIT` iterations of some size were further from the
        calibration than a margin can make up for."""
        for slowdowns in self._slowdowns:
            ordered = sorted(slowdowns)
            if len(ordered) == FIRST_FIT and (
                quantile(ordered, 1.0 - QUANTILE) > MAX_MARGIN
                or quantile(ordered, QUANTILE) < 1.0 / MAX_MARGIN
            ):
                return True
        return False

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from an iteration that took `seconds`."""
        num_tokens = step.num_tokens
        if seconds <= 0.0 or not num_tokens:
            return
        self._num_observed += 1
        latest = num_tokens / seconds
        self.tokens_per_second += WEIGHT * (latest - self.tokens_per_second)
        if self._next_fit and not step.moves:
            self._keep(StepCounts.of(step), seconds)
        curve = self.model.curve
        computed = num_tokens if num_tokens == len(step.entries) else self.model.padded(num_tokens)
        right = min(max(1, bisect_left(curve, (computed,))), len(curve) - 1)
        if self._rests[right - 1]:
            self._rests[right - 1] -= 1
            return
        counts = StepCounts.of(step)
        parts = self.model.parts(counts)
        predicted = sum(parts)
        if predicted > 0.0 and not step.moves:  # the time of KV moves is not modelled
            self.errors.observe(seconds / predicted)
            calibrated = sum(self._start.parts(counts))
            if calibrated > 0.0:
                self._slowdowns[right - 1].append(seconds / calibrated)
                if num_tokens == len(step.entries):
                    self._follow_decodes(seconds / calibrated, is_alone=not step.encodes)
                self._learn(right, seconds / predicted, parts, predicted / calibrated)

    def _keep(self, counts: StepCounts, seconds: float) -> None:
        """Keep an iteration for the next fit, and fit when it is time."""
        self._kept[counts.pieces > 0].append((counts, seconds))
        if self._num_observed >= self._next_fit:
            self._next_fit += self._next_fit // FITS_APART
            samples = [Sample(*of[:4], took, of.pieces) for each in self._kept for of, took in each]
            with suppress(ValueError):  # all of one size
                self._begin(fit(samples, graphs=self.model.graphs))

    def _follow_decodes(self, ratio: float, *, is_alone: bool) -> None:
        if not is_alone:
            ratio = min(ratio, self._decode_median())
        self._decode_ratios.append(ratio)
        self._decode_ratio = None

    def _learn(self, right: int, ratio: float, parts: StepParts, in_use: float) -> None:
        """Adjust the points `right - 1` and `right`, and the coefficients. `ratio` is that of
        measured to predicted seconds, `in_use` that of predicted to calibrated ones."""
        error, middle = self._error(right - 1, ratio)
        self._mean_errors[right - 1] += WEIGHT * (error - self._mean_errors[right - 1])
        is_right = abs(middle) <= SMALL_ERROR
        total, weight = sum(parts), WEIGHT if is_right else FASTER * WEIGHT
        gain = weight * error * total / sum([part * part for part in parts])
        num_points, factors = len(self._sizes), self._factors
        told = {right - 1: parts.tokens, right: parts.tokens}
        told |= {num_points + at: part for at, part in enumerate(parts[1:])}
        for at, part in told.items():
            factors[at] *= 1.0 + gain * part
            if part >= MIN_SHARE * total:
                self._used_at[at] = self._num_observed
        is_following = self._follow(in_use)
        self._ascend(right)
        self.model = self._corrected()
        self._num_right[right - 1] = self._num_right[right - 1] + 1 if is_right else 0
        is_settled = abs(self._mean_errors[right - 1]) <= SETTLED_ERROR and not is_following
        if self._num_right[right - 1] >= SETTLING and is_settled:
            self._rests[right - 1] = REST

    def _error(self, segment: int, ratio: float) -> tuple[float, float]:
        """The relative error to learn from, and the median of the recent ones of that size."""
        ratios = self._ratios[segment]
        ratios.append(min(max(ratio, 1.0 / MAX_ERROR), MAX_ERROR))
        middle = median(ratios) - 1.0
        is_outlier = abs(ratio - 1.0 - middle) > SMALL_ERROR
        return (middle if is_outlier else ratio - 1.0), middle

    def _follow(self, in_use: float) -> bool:
        """Move the factors that nothing is known of towards the one in use; returns whether any is
        still far from it."""
        is_following = False
        for at, used_at in enumerate(self._used_at):
            if self._num_observed - used_at > RECENT:
                distance = in_use / self._factors[at]
                self._factors[at] *= distance**WEIGHT
                is_following |= abs(distance - 1.0) > SETTLED_ERROR
        return is_following

    def _ascend(self, right: int) -> None:
        """Lower the points before `right - 1` and raise those behind `right` to an ascending
        curve."""
        calibrated, factors = self._calibrated, self._factors
        for at in range(right + 1, len(calibrated)):
            if calibrated[at]:
                least = calibrated[at - 1] * factors[at - 1] / calibrated[at]
                factors[at] = max(factors[at], least)
        for at in reversed(range(right)):
            if calibrated[at]:
                most = calibrated[at + 1] * factors[at + 1] / calibrated[at]
                factors[at] = min(factors[at], most)

    def _corrected(self) -> CostModel:
        """The calibration times the factors."""
        start, factors = self._start, self._factors
        scaled = [seconds * factors[at] for at, seconds in enumerate(self._calibrated)]
        points = accumulate(scaled, max)  # rounding must not make it descend
        slots, pairs, draws, pieces = factors[len(self._sizes) :]
        return replace(
            start,
            curve=tuple(zip(self._sizes, points, strict=True)),
            per_slot=start.per_slot * slots,
            per_pair=start.per_pair * pairs,
            per_draw=start.per_draw * draws,
            per_piece=start.per_piece * pieces,
        )
