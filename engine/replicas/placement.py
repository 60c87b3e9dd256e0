"""Placement: which replica gets a request. The server and the fleet simulator share this code."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Place = Callable[["Sequence[Load]"], int]


class Load(NamedTuple):
    """What a replica would do with a new request.

    `delay` is the forecast by how many seconds it ends later than on an idle replica, `num_live`
    the number of requests there, and `prefill` the seconds that the part of its prompt takes which
    the replica has not cached.
    """

    delay: float
    num_live: int
    prefill: float

    @property
    def growth(self) -> float:
        """The growth of the sum of all completion times if the request goes there."""
        return growth(self.delay, self.prefill, self.num_live)


def growth(delay: float, prefill: float, num_live: float) -> float:
    """The growth of the sum of all completion times with a request on a replica: it waits, and its
    prompt delays itself and each live request."""
    return delay + prefill * (num_live + 1)


def least_growth(loads: Sequence[Load]) -> int:
    """The replica on which the sum of all completion times grows least, the first one if several
    are equal. So a cached prefix is followed while it saves more than its replica's queue costs."""
    return min(range(len(loads)), key=lambda index: loads[index].growth)
