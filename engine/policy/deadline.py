"""Earliest feasible deadline first: ordered by the time when the first or last token is due.

A request that can no longer meet its deadline is moved behind those that can. It is then treated
as due `starvation_seconds` later, like a request without a deadline, so that it does not starve.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.errors import DeadlineUnmeetable, InvalidRequest
from engine.policy.base import PolicyBase, Preemption, SortKey
from engine.policy.forecast import Forecast, spread
from engine.policy.settings import PolicySettings
from engine.policy.waiting import MAX_AT_ONCE, STARVATION_SECONDS
from engine.ports import Cost
from engine.request import Request, RequestSpec
from engine.step import RequestId


class _DeadlineKey(NamedTuple):
    due: float
    request_id: RequestId  # breaks ties; the request itself is never compared
    request: Request


class EarliestFeasibleFirst(PolicyBase):
    """A list sorted by due time. A request that is forecast to miss its deadline is rejected."""

    preemption = Preemption.ALWAYS

    def __init__(self, cost: Cost, settings: PolicySettings | None = None) -> None:
        settings = settings or PolicySettings()
        self._cost = cost
        self._forecast = Forecast(cost, settings.seats)
        self._starvation_seconds = settings.starvation_seconds or STARVATION_SECONDS
        self._queue: list[_DeadlineKey] = []
        self._keys: dict[Request, _DeadlineKey] = {}
        self._in_time: set[Request] = set()  # have a deadline that they can still meet

    def validate(self, spec: RequestSpec, num_tokens: int, now: float) -> None:
        """Reject a request that would miss a deadline.

        Raises `InvalidRequest` if it would even without other requests, else
        `DeadlineUnmeetable`.
        """
        limits = [limit for limit in (spec.ttft_deadline, spec.deadline) if limit is not None]
        if not limits:
            return
        wait = self._forecast.wait(*self._ahead_of(now + min(limits), now))
        first = self._cost.compute(num_tokens, len(spec.prompt) - num_tokens)
        others = self._forecast.decodes_left(spec, produced=1)
        alone = first + others * self._forecast.pace_alone(spec)
        shared = wait + first + others * self._forecast.pace(spec)
        _check("ttft_deadline", spec.ttft_deadline, first, wait + first)
        _check("deadline", spec.deadline, alone, shared)

    def _ahead_of(self, due: float, now: float) -> tuple[list[Request], int]:
        """A sample of the requests due before `due` that can be in time, and their number."""
        end = bisect_left(self._queue, due, key=lambda key: key.due)
        sample = [self._queue[i].request for i in spread(end)]
        ahead = [request for request in sample if self._can_be_in_time(request, now)]
        return ahead, round(end * len(ahead) / max(1, len(sample)))

    def arrive(self, request: Request, now: float) -> None:
        due = self._due(request, has_started=bool(request.output))
        self._insert(request, due, is_in_time=due is not None)

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        """Learn the pace; after its first token a request is due at its end, not at that token."""
        self._forecast.observe(seconds, now)
        is_first = not request.output and not request.remaining
        if is_first and request in self._in_time and request.spec.ttft_deadline is not None:
            due = self._due(request, has_started=True)
            self._remove(request)
            self._insert(request, due, is_in_time=due is not None)

    def leave(self, request: Request, now: float) -> None:
        self._remove(request)
        self._forecast.ended(request)
        if not self._queue:
            self._forecast.rest()

    def order(self, now: float) -> Iterator[Request]:
        """Requests by due time. One that is found to be late on the way moves further back, at most
        `MAX_AT_ONCE` of them per walk.

        The walk continues from the last key, so that others may change the queue meanwhile.
        """
        num_late, at = 0, 0
        while at < len(self._queue):
            key = self._queue[at]
            request = key.request
            may_be_late = request in self._in_time and num_late < MAX_AT_ONCE
            if may_be_late and self._postpone_if_late(request, now):
                num_late += 1
                at = bisect_left(self._queue, key)  # its key may be the same as before
                continue
            yield request
            is_same = at < len(self._queue) and self._queue[at] is key
            at = at + 1 if is_same else bisect_right(self._queue, key)

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        """Due times, after requests that are found to be late have moved further back."""
        for request in requests:
            self._postpone_if_late(request, now)
        return [self._keys[request][:2] for request in requests]

    def _due(self, request: Request, has_started: bool) -> float | None:
        """The earliest time that the request has to meet; None if it has no deadline."""
        spec, began = request.spec, request.times.arrived_at
        limits = [spec.deadline, None if has_started else spec.ttft_deadline]
        return min((began + limit for limit in limits if limit is not None), default=None)

    def _can_be_in_time(self, request: Request, now: float) -> bool:
        """False only for a request that has a deadline and can no longer meet it."""
        if request not in self._in_time:
            return True
        spec = request.spec
        age = now - request.times.arrived_at + self._forecast.first_token(request)
        if spec.ttft_deadline is not None and not request.output and age > spec.ttft_deadline:
            return False
        if spec.deadline is None:
            return True
        others = self._forecast.decodes_left(spec, request.produced + 1)
        return age + others * self._forecast.pace(spec) <= spec.deadline

    def _postpone_if_late(self, request: Request, now: float) -> bool:
        if self._can_be_in_time(request, now):
            return False
        due = max(now + self._starvation_seconds, self._keys[request].due)
        self._remove(request)
        self._insert(request, due, is_in_time=False)
        return True

    def _insert(self, request: Request, due: float | None, is_in_time: bool) -> None:
        if due is None:
            due = request.times.arrived_at + self._starvation_seconds
        key = self._keys[request] = _DeadlineKey(due, request.request_id, request)
        insort(self._queue, key)
        if is_in_time:
            self._in_time.add(request)

    def _remove(self, request: Request) -> None:
        del self._queue[bisect_left(self._queue, self._keys.pop(request))]
        self._in_time.discard(request)


def _check(param: str, limit: float | None, alone: float, shared: float) -> None:
    """Raise unless `limit` can be met: in `alone` seconds without other requests, and in `shared`
    seconds with those that are live now."""
    if limit is None or max(alone, shared) <= limit:
        return
    if alone > limit:
        raise InvalidRequest(
            f"{param} is {limit:g} s, but the request takes about {alone:.3g} s on this server "
            "even without other requests.",
            param,
        )
    raise DeadlineUnmeetable(
        f"{param} is {limit:g} s, but with the requests queued before it the request would "
        f"take about {shared:.3g} s.",
        retry_after=shared - limit,
    )
