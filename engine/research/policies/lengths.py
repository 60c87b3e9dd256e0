"""LearnedLengths: the distribution of output lengths, learned while serving.

The estimator is Kaplan and Meier's (1958), over geometric bins of lengths. The *hazard* of a bin is
the share of the outputs that reached the bin which ended in it. An output that still runs, or that
was cut by `max_tokens`, a cancel or an error, is *censored*: it counts in each bin that it passed,
and says nothing about later bins. (A histogram of ended outputs alone is too short, because short
outputs end first.) Older observations weigh less, so that the estimate follows a change of load.

Requests with similar prompt lengths are a *stratum*, with an estimate of its own: prompts of one
application have similar lengths, and so have its outputs. It begins as the estimate of all requests
and departs from it with observations.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import log

GROWTH = 1.15  # ratio of the lower ends of two bins
NUM_BINS = 72  # the last one begins beyond 25,000 tokens
DECAY = 0.9995  # factor of the weight of all earlier observations, per ended output
STRATUM_RATIO = 1.25  # the longest prompt of a stratum divided by its shortest
PRIOR = 10.0  # weight of all requests' hazards in those of a stratum, in outputs
TAIL_HAZARD = 0.12  # the hazard of a bin without observations
TAIL_WEIGHT = 0.5  # outputs by which `TAIL_HAZARD` counts
MAX_WEIGHT = 1e9  # an observation's weight at which all are scaled down


def _edges() -> tuple[int, ...]:
    edges = [1]
    while len(edges) <= NUM_BINS:
        edges.append(max(edges[-1] + 1, round(edges[-1] * GROWTH)))
    return tuple(edges)


EDGES = _edges()  # bin k has the lengths from EDGES[k] to EDGES[k + 1] - 1


def bin_of(length: int) -> int:
    """The bin of an output of so many tokens, at least 1; the last bin has all longer ones too."""
    return min(bisect_right(EDGES, length), NUM_BINS) - 1


def stratum_of(prompt_len: int) -> int:
    """Prompt lengths of a stratum differ by a factor of `STRATUM_RATIO` at most."""
    return int(log(prompt_len) / log(STRATUM_RATIO))


class _Counts:
    """Weighted counts of outputs that reached each bin, and of those that ended in it."""

    def __init__(self) -> None:
        self.reached = [0.0] * NUM_BINS
        self.ended = [0.0] * NUM_BINS

    def hazards(self, prior: Sequence[float], weight: float) -> list[float]:
        """The hazards, as if outputs of so much weight had followed those of `prior`."""
        return [
            (ended + weight * hazard) / (reached + weight)
            for reached, ended, hazard in zip(self.reached, self.ended, prior, strict=True)
        ]

    def scale(self, factor: float) -> None:
        self.reached = [one * factor for one in self.reached]
        self.ended = [one * factor for one in self.ended]


class LearnedLengths:
    """One estimate for all outputs, and one for each stratum of prompt lengths."""

    def __init__(self) -> None:
        self.num_observed = 0  # outputs that ended by themselves
        # The next observation's weight, which grows instead of all others shrinking
        self._weight = 1.0
        self._all = _Counts()
        self._strata: dict[int, _Counts] = {}

    def passed(self, stratum: int, number: int) -> None:
        """An output of the stratum is longer than bin `number`."""
        self._all.reached[number] += self._weight
        self._counts(stratum).reached[number] += self._weight

    def ended(self, stratum: int, number: int) -> None:
        """An output of the stratum ended by itself in bin `number`, after all bins before."""
        for counts in (self._all, self._counts(stratum)):
            counts.reached[number] += self._weight
            counts.ended[number] += self._weight
        self.num_observed += 1
        self._weight /= DECAY
        if self._weight > MAX_WEIGHT:
            for counts in (self._all, *self._strata.values()):
                counts.scale(1.0 / self._weight)
            self._weight = 1.0

    def hazards(self) -> list[float]:
        """The probability, for each bin, that an output which reaches it ends in it."""
        return self._all.hazards([TAIL_HAZARD] * NUM_BINS, TAIL_WEIGHT * self._weight)

    def stratum_hazards(self, stratum: int, general: list[float]) -> list[float]:
        """The same for the outputs of a stratum; `general` is what `hazards` returns now."""
        if stratum not in self._strata:
            return general
        return self._strata[stratum].hazards(general, PRIOR * self._weight)

    def _counts(self, stratum: int) -> _Counts:
        counts = self._strata.get(stratum)
        if counts is None:
            counts = self._strata[stratum] = _Counts()
        return counts

    def quantile(self, share: float) -> int:
        """The length that a `share` of the outputs do not exceed, rounded up to the end of a bin;
        0 before any output has ended."""
        if not self.num_observed:
            return 0
        alive = 1.0
        for number, hazard in enumerate(self.hazards()):
            alive *= 1.0 - hazard
            if 1.0 - alive >= share:
                return EDGES[number + 1] - 1
        return EDGES[-1]
