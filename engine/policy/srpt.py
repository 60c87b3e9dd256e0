"""Shortest remaining processing time: an oracle that knows how long each answer will be.

It takes `max_tokens` for the true length, which only a trace can promise; so it bounds from
below what any policy could do in a simulation, and is not offered for serving.
"""

from bisect import bisect_left, insort
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from engine.policy.expected_order import by_place
from engine.policy.settings import PolicySettings
from engine.policy.waiting import WaitingTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.ports import Cost
    from engine.request import Request, RequestSpec
    from engine.step import RequestId


class _RemainingKey(NamedTuple):
    seconds: float  # of work that is left
    request_id: "RequestId"  # decides between equals; the request itself is never compared
    request: "Request"


class ShortestRemainingFirst:
    """A sorted list by seconds of work left. Nobody is rescued from starving unless asked for."""

    preempts = True

    def __init__(self, cost: "Cost", settings: PolicySettings | None = None) -> None:
        self._cost = cost
        self._patience = WaitingTimes((settings or PolicySettings()).starvation_seconds or inf)
        self._rescued: set[Request] = set()
        self._queue: list[_RemainingKey] = []
        self._places: dict[Request, _RemainingKey] = {}

    def validate(self, spec: "RequestSpec", num_tokens: int, now: float) -> None:
        return None

    def arrive(self, request: "Request", now: float) -> None:
        self._patience.watch(request, now)
        self._file(request, self._left(request))

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        if request not in self._rescued:
            self._patience.watch(request, now)
            self._withdraw(request)
            self._file(request, self._left(request))

    def leave(self, request: "Request", now: float) -> None:
        self._patience.forget(request)
        self._rescued.discard(request)
        self._withdraw(request)

    def order(self, now: float) -> "Iterator[Request]":
        for request in self._patience.starving(now):
            self._patience.forget(request)
            self._rescued.add(request)
            self._withdraw(request)
            self._file(request, -inf)
        return (place.request for place in self._queue)

    def next_scheduled_times(self, requests: "Sequence[Request]", now: float) -> list[float]:
        return by_place(self.order(now), requests)

    def _left(self, request: "Request") -> float:
        """Seconds that it would take alone, up to the last token of its answer."""
        remaining, start = request.remaining, request.num_computed
        first = self._cost.compute(remaining, start) if remaining else 0.0
        others = request.spec.max_tokens - request.produced - 1
        return first + others * self._cost.compute(1, request.num_tokens)

    def _file(self, request: "Request", seconds: float) -> None:
        place = self._places[request] = _RemainingKey(seconds, request.request_id, request)
        insort(self._queue, place)

    def _withdraw(self, request: "Request") -> None:
        del self._queue[bisect_left(self._queue, self._places.pop(request))]
