"""First come, first served at iteration level (Orca, section 4.1 and algorithm 1), in turns.

While requests of several clients wait, the clients take turns, so that one that sends thousands at
once delays another's request by one of its own. This is start-time fair queueing (Goyal et al.,
SIGCOMM 1996) with a cost of one for each request: a request's turn is the one after that of its
client's last waiting request, or the present turn if that is later or none waits. Each start
advances the present turn by one over the number of clients that wait, so that a request also gets
its turn where new clients come without end. The requests of one client are served in the order of
their arrival, and so are all requests if only one client has any.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING

from engine.policy.base import PolicyBase
from engine.policy.port import Preemption

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.policy.port import SortKey
    from engine.policy.settings import PolicySettings
    from engine.ports import Cost
    from engine.request import Request


class FirstComeFirstServed(PolicyBase):
    """A request's place follows from its arrival, and preemption does not change it. Uses neither
    cost nor settings."""

    preemption = Preemption.NEVER

    def __init__(
        self, cost: "Cost | None" = None, settings: "PolicySettings | None" = None
    ) -> None:
        self._keys: dict[Request, SortKey] = {}  # the turn, and the number of the arrival
        self._waiting: dict[str, dict[Request, None]] = {}  # by client, those that never started
        self._sorted_keys: list[SortKey] = []
        self._sorted: list[Request] = []  # by these keys
        self._turn = 0.0
        self._num_arrived = 0

    def arrive(self, request: "Request", now: float) -> None:
        waiting = self._waiting.setdefault(request.spec.client, {})
        turn = self._turn
        if waiting:
            turn = max(turn, self._keys[next(reversed(waiting))][0] + 1.0)
        waiting[request] = None
        key = self._keys[request] = (turn, self._num_arrived)
        self._num_arrived += 1
        at = bisect_left(self._sorted_keys, key)
        self._sorted_keys.insert(at, key)
        self._sorted.insert(at, request)

    def start(self, request: "Request") -> None:
        if request in self._waiting.get(request.spec.client, ()):
            self._turn = max(self._turn, self._keys[request][0]) + 1.0 / len(self._waiting)
            self._no_longer_waits(request)

    def leave(self, request: "Request", now: float) -> None:
        self._no_longer_waits(request)
        at = bisect_left(self._sorted_keys, self._keys.pop(request))
        del self._sorted_keys[at], self._sorted[at]

    def order(self, now: float) -> "Iterator[Request]":
        return iter(self._sorted)

    def sort_keys(self, requests: "Sequence[Request]", now: float) -> "list[SortKey]":
        return [self._keys[request] for request in requests]

    def _no_longer_waits(self, request: "Request") -> None:
        waiting = self._waiting.get(request.spec.client, {})
        waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(request.spec.client, None)
