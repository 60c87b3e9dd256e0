"""Course: what is expected of a running output, and its Gittins rank, from learned hazards."""

from bisect import bisect_right
from itertools import pairwise
from math import inf
from operator import truediv
from typing import TYPE_CHECKING, NamedTuple

from engine.policy.estimates.lengths import EDGES, NUM_BINS

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_RANK = 1e-3
WIDTHS = [stop - start for start, stop in pairwise(EDGES)]  # of the bins


class Outlook(NamedTuple):
    """Rank of a request in units, and the decodes expected until it ends."""

    rank: float
    decodes: float


class Course(NamedTuple):
    """What is expected of a request that has produced the tokens before bin `age_bin`: for each bin
    from there on, the decodes until its end, and the probability to end until then."""

    age_bin: int
    decodes: list[float]
    ended: list[float]

    @classmethod
    def of(cls, hazards: "Sequence[float]", age_bin: int) -> "Course":
        found = cls(age_bin, [], [])
        alive, decodes = 1.0, 0.0
        for number in range(age_bin, NUM_BINS):
            ends = alive * hazards[number]
            decodes += (alive - ends / 2) * WIDTHS[number]
            alive -= ends
            found.decodes.append(decodes)
            found.ended.append(1.0 - alive)
        return found

    def outlook(self, prefill: float, cap: int) -> Outlook:
        """With `prefill` units of prefill to do; the request ends before bin `cap` + 1."""
        stop = max(cap - self.age_bin, 1)
        first = bisect_right(self.ended, 0.0)
        decodes = self.decodes[stop - 1]
        works = map(prefill.__add__, self.decodes[first:stop])
        rank = min(map(truediv, works, self.ended[first:stop]), default=inf)
        return Outlook(max(LEAST_RANK, min(rank, prefill + decodes)), decodes)
