"""Shortest remaining processing time: an oracle that knows the length of each output.

It takes `max_tokens` for the output's length, which is true only for requests of a trace. So its
mean completion time in a simulation is a lower bound for all policies; it cannot be served with.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from engine.policy.base import PolicyBase, Preemption, SortKey
from engine.policy.settings import PolicySettings
from engine.policy.waiting import WaitingTimes
from engine.ports import Cost
from engine.request import Request
from engine.step import RequestId


class _RemainingKey(NamedTuple):
    seconds: float  # seconds of work that is left
    request_id: RequestId  # breaks ties; the request itself is never compared
    request: Request


class ShortestRemainingFirst(PolicyBase):
    """A list sorted by seconds of work left. Without `starvation_seconds` requests may starve."""

    preemption = Preemption.ALWAYS

    def __init__(self, cost: Cost, settings: PolicySettings | None = None) -> None:
        self._cost = cost
        self._waiting = WaitingTimes((settings or PolicySettings()).starvation_seconds or inf)
        self._promoted: set[Request] = set()
        self._queue: list[_RemainingKey] = []
        self._keys: dict[Request, _RemainingKey] = {}

    def arrive(self, request: Request, now: float) -> None:
        self._waiting.restart(request, now)
        self._insert(request, self._left(request))

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        if request not in self._promoted:
            self._waiting.restart(request, now)
            self._remove(request)
            self._insert(request, self._left(request))

    def leave(self, request: Request, now: float) -> None:
        self._waiting.remove(request)
        self._promoted.discard(request)
        self._remove(request)

    def order(self, now: float) -> Iterator[Request]:
        for request in self._waiting.starving(now):
            self._waiting.remove(request)
            self._promoted.add(request)
            self._remove(request)
            self._insert(request, -inf)
        return (key.request for key in self._queue)

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        return [self._keys[request][:2] for request in requests]

    def _left(self, request: Request) -> float:
        """Seconds until the request's last token if it ran alone."""
        remaining, start = request.remaining, request.num_computed
        first = self._cost.compute(remaining, start) if remaining else 0.0
        others = max(0, request.spec.max_tokens - request.produced - 1)
        return first + others * self._cost.compute(1, request.num_tokens)

    def _insert(self, request: Request, seconds: float) -> None:
        key = self._keys[request] = _RemainingKey(seconds, request.request_id, request)
        insort(self._queue, key)

    def _remove(self, request: Request) -> None:
        del self._queue[bisect_left(self._queue, self._keys.pop(request))]
