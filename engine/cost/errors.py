"""PredictionErrors: how far predicted seconds of steps were from measured ones."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# Swept in results/constants
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
