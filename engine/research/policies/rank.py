"""The Gittins rank of a request, from learned hazards of output lengths."""

from bisect import bisect_right
from itertools import accumulate, islice, pairwise
from math import exp, floor, inf, log1p
from operator import add, mul, truediv
from typing import TYPE_CHECKING

from engine.research.policies.lengths import EDGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.research.policies.lengths import LearnedLengths

MIN_RANK = 1e-3
ONE = 1.0
HALF_WIDTHS = [(stop - start) / 2 for start, stop in pairwise(EDGES)]  # half the width of each bin


def gittins_rank(hazards: "Sequence[float]", age_bin: int, prefill: float, cap: int) -> float:
    """The rank, in decodes, of a request that has produced the tokens before bin `age_bin`, with
    `prefill` units of prefill to do; it ends before bin `cap`, or after one more bin.

    The horizons are the upper ends of bins. An output that ends in a bin ends in its middle.
    """
    stop = max(cap, age_bin + 1)
    alive = [*accumulate(map(ONE.__sub__, hazards[age_bin:stop]), mul, initial=ONE)]
    decodes = map(mul, HALF_WIDTHS[age_bin:stop], map(add, alive, islice(alive, 1, None)))
    works: list[float] = [*accumulate(decodes, initial=prefill)]
    ended = [*map(ONE.__sub__, alive)]
    first = bisect_right(ended, 0.0)
    rank = min(map(truediv, works[first:], ended[first:]), default=inf)
    return max(MIN_RANK, min(rank, works[-1]))


class LearnedRanks:
    """Ranks by the lengths that were learned when `renew` was called. Each is computed when it is
    needed first."""

    def __init__(self, lengths: "LearnedLengths") -> None:
        self.version = -1
        self._ranks: dict[tuple[int, int, int, int], float] = {}
        self._hazards: dict[int, list[float]] = {}  # by stratum
        self.renew(lengths)

    def renew(self, lengths: "LearnedLengths") -> None:
        self.version += 1
        self._lengths = lengths
        self._general = lengths.hazards()
        self._hazards.clear()
        self._ranks.clear()

    def rank(self, stratum: int, age_bin: int, prefill: int, cap: int) -> float:
        """The `gittins_rank` of a class of prefills, with the hazards of a stratum."""
        key = stratum, age_bin, prefill, cap
        rank = self._ranks.get(key)
        if rank is None:
            hazards = self._hazards.get(stratum)
            if hazards is None:
                hazards = self._lengths.stratum_hazards(stratum, self._general)
                self._hazards[stratum] = hazards
            rank = self._ranks[key] = gittins_rank(hazards, age_bin, units_of(prefill), cap)
        return rank


def prefill_class(units: float) -> int:
    """Classes of prefills a factor of 1.22 apart, from 0 for none."""
    return floor(5.0 * log1p(units) + 0.5)


def units_of(prefill: int) -> float:
    """The units that stand for a class of prefills."""
    return exp(prefill / 5.0) - 1.0
