"""Earliest feasible deadline first: by the moment when a token is due, first or last.

What can no longer be in time goes behind what can. Such requests, and those that never had a
deadline, are due `starvation_seconds` later, so they are passed by many but not for ever.
"""

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import DeadlineUnmeetable, InvalidRequest
from engine.policy.expected_order import by_place
from engine.policy.forecast import Forecast
from engine.policy.settings import PolicySettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.ports import Cost
    from engine.request import Request, RequestSpec
    from engine.step import RequestId

STARVATION_SECONDS = 60.0


class _DeadlineKey(NamedTuple):
    due: float
    request_id: "RequestId"  # decides between equals; the request itself is never compared
    request: "Request"


class EarliestFeasibleFirst:
    """A sorted list by due moment. What the forecast says cannot be met is refused at once."""

    preempts = True

    def __init__(self, cost: "Cost", settings: PolicySettings | None = None) -> None:
        settings = settings or PolicySettings()
        self._cost = cost
        self._forecast = Forecast(cost, settings.seats)
        self._patience = settings.starvation_seconds or STARVATION_SECONDS
        self._queue: list[_DeadlineKey] = []
        self._places: dict[Request, _DeadlineKey] = {}
        self._in_time: set[Request] = set()  # have a deadline that they may still meet

    def validate(self, spec: "RequestSpec", num_tokens: int, now: float) -> None:
        """Refuse what cannot be in time: for good if not even alone, else until later."""
        limits = [limit for limit in (spec.ttft_deadline, spec.deadline) if limit is not None]
        if not limits:
            return
        end = bisect_left(self._queue, now + min(limits), key=lambda place: place.due)
        wait = self._forecast.wait(place.request for place in self._queue[:end])
        first = self._cost.compute(num_tokens, len(spec.prompt) - num_tokens)
        others = self._forecast.decodes_left(spec, produced=1)
        alone = first + others * self._forecast.pace_alone(spec)
        shared = wait + first + others * self._forecast.pace(spec)
        _check("ttft_deadline", spec.ttft_deadline, first, wait + first)
        _check("deadline", spec.deadline, alone, shared)

    def arrive(self, request: "Request", now: float) -> None:
        due = self._due(request, has_started=bool(request.output))
        self._file(request, due, is_in_time=due is not None)

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        """Its first token moves what it is due for from that token to the end."""
        self._forecast.observe(seconds, now)
        is_first = not request.output and not request.remaining
        if is_first and request in self._in_time and request.spec.ttft_deadline is not None:
            due = self._due(request, has_started=True)
            self._withdraw(request)
            self._file(request, due, is_in_time=due is not None)

    def leave(self, request: "Request", now: float) -> None:
        self._withdraw(request)
        self._forecast.ended(request)
        if not self._queue:
            self._forecast.rest()

    def order(self, now: float) -> "Iterator[Request]":
        """By due moment; who is found late on the way takes its new place further back."""
        late: list[_DeadlineKey] = []
        for place in tuple(self._queue):
            request = place.request
            while late and late[0] < place:
                yield heappop(late).request
            if not self._can_be_in_time(request, now):
                self._withdraw(request)
                self._file(request, now + self._patience, is_in_time=False)
            if self._places[request] is place:
                yield request
            else:
                heappush(late, self._places[request])
        while late:
            yield heappop(late).request

    def next_scheduled_times(self, requests: "Sequence[Request]", now: float) -> list[float]:
        return by_place(self.order(now), requests)

    def _due(self, request: "Request", has_started: bool) -> float | None:
        """The earliest moment that the request is to meet; None if there is none."""
        spec = request.spec
        limits = [spec.deadline, None if has_started else spec.ttft_deadline]
        return min(
            (request.arrived_at + limit for limit in limits if limit is not None), default=None
        )

    def _can_be_in_time(self, request: "Request", now: float) -> bool:
        """False only for one that has a deadline to meet and can no longer meet it."""
        if request not in self._in_time:
            return True
        spec = request.spec
        age = now - request.arrived_at + self._forecast.first_token(request)
        if spec.ttft_deadline is not None and not request.output and age > spec.ttft_deadline:
            return False
        if spec.deadline is None:
            return True
        others = self._forecast.decodes_left(spec, request.produced + 1)
        return age + others * self._forecast.pace(spec) <= spec.deadline

    def _file(self, request: "Request", due: float | None, is_in_time: bool) -> None:
        if due is None:
            due = request.arrived_at + self._patience
        place = self._places[request] = _DeadlineKey(due, request.request_id, request)
        insort(self._queue, place)
        if is_in_time:
            self._in_time.add(request)

    def _withdraw(self, request: "Request") -> None:
        del self._queue[bisect_left(self._queue, self._places.pop(request))]
        self._in_time.discard(request)


def _check(param: str, limit: float | None, alone: float, shared: float) -> None:
    """Seconds that it takes with the server for itself, and with what is there now."""
    if limit is None or max(alone, shared) <= limit:
        return
    if alone > limit:
        raise InvalidRequest(
            f"{param} is {limit:g} s, but the request takes about {alone:.3g} s of this "
            "server even when it has it for itself.",
            param,
        )
    raise DeadlineUnmeetable(
        f"{param} is {limit:g} s, but with what is queued before it the request would take "
        f"about {shared:.3g} s.",
        retry_after=shared - limit,
    )
