"""A cost model that is refined while serving, without being misled by single slow iterations.

An iteration adjusts the two points of the curve around its number of tokens, and the coefficients
of attention and sampling, each in proportion to the seconds that it contributes (normalized least
mean squares). So drift is followed, and an error that grows with the context is corrected where it
comes from. An error that differs from the median of the last iterations of that size by more than
`SMALL_ERROR` is replaced by the median: a stall of one or two iterations changes nothing. Since
larger iterations never take less time, points below are lowered and points above are raised to
keep the curve ascending.

Iterations of decodes only are also followed apart from all others, by one factor on the calibrated
model: the median of the last of them.

While the iterations of a size take as long as predicted on average, only every eighth of them is
looked at: learning takes as much of the event loop's time as planning an iteration.

An estimate that is too high may keep its size from being used, and so from being corrected. So a
point that is not used, and is slower relative to the calibration than the sizes in use, returns
slowly to the calibration.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING

from engine.cost.errors import PredictionErrors, quantile
from engine.cost.model import StepCounts, StepParts

if TYPE_CHECKING:
    from engine.cost.model import CostModel
    from engine.step import Step

DECODES = 32  # iterations of decodes only whose median factor counts
WINDOW = 5  # iterations of a size whose median error counts
MAX_ERROR = 4.0  # the largest factor between measured and predicted seconds that is learned from
SMALL_ERROR = 0.25  # of a right prediction; larger errors are corrected faster
FASTER = 4.0  # by this factor
UNUSED = 32  # iterations after which a point counts as not used
RETURN = 0.01  # share by which an unused point that is too slow returns in each iteration
SETTLING = 20  # right predictions in a row, after which
SETTLED_ERROR = 0.02  # a size is settled, if their mean error is below this
CONFIRMING = 64  # iterations of a size confirm that it is faster than calibrated
SLOWEST, FASTEST = 0.9, 0.1  # the quantiles of their durations that count
REFUTING = 1.5  # times as long as calibrated: the calibration is wrong
NO_PARTS = StepParts(0.0, 0.0, 0.0, 0.0, 0.0)
REST = 7  # iterations of a settled size that are not learned from, after each that is


class LiveCost:
    """A `Cost` that learns from iterations. `model` is its present state."""

    def __init__(self, model: "CostModel", weight: float = 0.05) -> None:
        self.model = model
        self.errors = PredictionErrors()
        self._start = model  # as calibrated
        self._weight = weight
        self.tokens_per_second = 1.0 / model.compute(1, 0)
        self._sizes, calibrated = zip(*model.curve, strict=True)
        self._calibrated = list(calibrated)
        segments = range(len(model.curve) - 1)  # between two points
        self._ratios = [deque([1.0] * WINDOW, WINDOW) for _ in segments]
        # Measured to calibrated seconds
        self._slowdowns: list[deque[float]] = [deque(maxlen=CONFIRMING) for _ in segments]
        self._num_right = [0 for _ in segments]  # predictions in a row
        self._mean_errors = [0.0 for _ in segments]  # of the last iterations
        self._rests = [0 for _ in segments]  # iterations that will not be learned from
        self._used_at = [0 for _ in model.curve]  # by the number of observed iterations
        self._num_observed = 0
        self._decode_ratios = deque([1.0], DECODES)  # measured to calibrated seconds
        self._decode_ratio: float | None = 1.0  # their median; None until it is asked for

    @property
    def margin(self) -> float:
        """The factor by which at most a tenth of the recent steps exceeded their prediction."""
        return self.errors.margin

    def compute(self, num_tokens: int, start: int) -> float:
        return self.model.compute(num_tokens, start)

    def step(self, step: "Step") -> float:
        return self.model.step(step)

    def decodes(self, num_rows: int, num_slots: int) -> float:
        """Seconds of an iteration of `num_rows` decodes which read `num_slots` slots together, as
        the last iterations of decodes only took."""
        if self._decode_ratio is None:
            self._decode_ratio = median(self._decode_ratios)
        return self._decode_ratio * self._start.decodes(num_rows, num_slots)

    def tokens_within(self, seconds: float, num_tokens: int, start: int, beside: int) -> int:
        """As `CostModel.tokens_within`."""
        return self.model.tokens_within(seconds, num_tokens, start, beside)

    def seconds_for(self, num_tokens: int) -> float:
        """Seconds to compute `num_tokens` waiting tokens at the recent rate."""
        return num_tokens / self.tokens_per_second

    def confirmed(self) -> "CostModel | None":
        """The calibrated model with its points lowered where nearly all iterations of the sizes
        around them took less time than calibrated; None if there are none.

        Nothing else that was learned is left, so that no server begins with a model that is faster
        than the machine: which part of an iteration takes its time is a guess, and saved guesses
        would add up from one start to the next. Slower points are left out, because a period in
        which the machine was busy is not to be saved.
        """
        factors = self._quantiles(SLOWEST)
        points = []
        for at, seconds in enumerate(self._calibrated):
            beside = [each for each in factors[max(0, at - 1) : at + 1] if each is not None]
            points.append(seconds * min(1.0, max(beside, default=1.0)))
        if points == self._calibrated:
            return None
        ascending = accumulate(points, max)
        return replace(self._start, curve=tuple(zip(self._sizes, ascending, strict=True)))

    @property
    def is_refuted(self) -> bool:
        """Whether nearly all iterations of some sizes took much longer than calibrated."""
        return any(
            slowdown is not None and slowdown > REFUTING for slowdown in self._quantiles(FASTEST)
        )

    def _quantiles(self, share: float) -> list[float | None]:
        """Of measured to calibrated seconds, for each segment with enough iterations."""
        return [
            quantile(sorted(slowdowns), share) if len(slowdowns) == CONFIRMING else None
            for slowdowns in self._slowdowns
        ]

    def observe(self, step: "Step", seconds: float) -> None:
        """Learn from an iteration that took `seconds`."""
        num_tokens = step.num_tokens
        if seconds <= 0.0 or not num_tokens:
            return
        latest = num_tokens / seconds
        self.tokens_per_second += self._weight * (latest - self.tokens_per_second)
        curve = self.model.curve
        right = min(max(1, bisect_left(curve, (num_tokens,))), len(curve) - 1)
        if self._rests[right - 1]:
            self._rests[right - 1] -= 1
            return
        counts = StepCounts.of(step)
        parts = self.model.parts(counts)
        predicted = sum(parts)
        if predicted > 0.0 and not step.moves:  # the time of KV moves is not modelled
            self.errors.observe(seconds / predicted)
            if calibrated := sum(self._start.parts(counts)):
                self._slowdowns[right - 1].append(seconds / calibrated)
                if num_tokens == len(step.entries):
                    self._follow_decodes(seconds / calibrated)
            self._learn(right, seconds / predicted, parts)

    def _follow_decodes(self, ratio: float) -> None:
        self._decode_ratios.append(ratio)
        self._decode_ratio = None

    def _learn(self, right: int, ratio: float, parts: StepParts) -> None:
        """Adjust the points `right - 1` and `right`, and the other coefficients; `ratio` is that of
        measured to predicted seconds."""
        error, middle = self._error(right - 1, ratio)
        self._mean_errors[right - 1] += self._weight * (error - self._mean_errors[right - 1])
        is_right = abs(middle) <= SMALL_ERROR
        weight = self._weight if is_right else FASTER * self._weight
        points = [seconds for _, seconds in self.model.curve]
        self._num_observed += 1
        gain = weight * error * sum(parts) / sum([part * part for part in parts])
        for at in (right - 1, right):
            points[at] *= 1.0 + gain * parts.tokens
            self._used_at[at] = self._num_observed
        is_returning = self._return(points, right)
        for at in range(right + 1, len(points)):
            points[at] = max(points[at], points[at - 1])
        for at in reversed(range(right - 1)):
            points[at] = min(points[at], points[at + 1])
        self.model = self._with(points, gain, parts)
        self._num_right[right - 1] = self._num_right[right - 1] + 1 if is_right else 0
        is_settled = abs(self._mean_errors[right - 1]) <= SETTLED_ERROR and not is_returning
        if self._num_right[right - 1] >= SETTLING and is_settled:
            self._rests[right - 1] = REST

    def _error(self, segment: int, ratio: float) -> tuple[float, float]:
        """The relative error to learn from, and the median of the recent ones of that size."""
        ratios = self._ratios[segment]
        ratios.append(min(max(ratio, 1.0 / MAX_ERROR), MAX_ERROR))
        middle = median(ratios) - 1.0
        is_outlier = abs(ratio - 1.0 - middle) > SMALL_ERROR
        return (middle if is_outlier else ratio - 1.0), middle

    def _return(self, points: list[float], right: int) -> bool:
        """Lower the unused points which are slower than calibrated, and than those in use; returns
        whether there are any."""
        pairs = zip(points, self._calibrated, strict=True)
        slowdowns = [took / calibrated if calibrated else 1.0 for took, calibrated in pairs]
        in_use = max(1.0, slowdowns[right - 1], slowdowns[right])
        is_returning = False
        if max(slowdowns) > in_use:
            for at, used_at in enumerate(self._used_at):
                is_unused = self._num_observed - used_at > UNUSED
                if is_unused and slowdowns[at] > in_use:
                    points[at] *= 1.0 - RETURN
                    is_returning = True
        return is_returning

    def _with(
        self, points: list[float], gain: float = 0.0, parts: StepParts = NO_PARTS
    ) -> "CostModel":
        """The model with other seconds at the points of the curve, and other coefficients."""
        model, start = self.model, self._start
        return replace(
            model,
            curve=tuple(zip(self._sizes, points, strict=True)),
            per_slot=_near(start.per_slot, model.per_slot * (1.0 + gain * parts.slots)),
            per_pair=_near(start.per_pair, model.per_pair * (1.0 + gain * parts.pairs)),
            per_draw=_near(start.per_draw, model.per_draw * (1.0 + gain * parts.draws)),
            per_piece=_near(start.per_piece, model.per_piece * (1.0 + gain * parts.pieces)),
        )


def _near(calibrated: float, value: float) -> float:
    """The coefficient, at most `MAX_ERROR` times more or less than calibrated."""
    return min(max(value, calibrated / MAX_ERROR), calibrated * MAX_ERROR)
