"""GoodputFirst: requests that can still meet the goal for their TTFT, before those that missed it.

Goodput counts the requests that meet their goals. Under overload every policy without a goal lets
the queue grow until most of them miss it. Here a waiting request which cannot have its first token
in time any more is moved behind all that can, so that it delays none of these. Goals for the time
between tokens are met by `engine.control.step_time`.

Bounded unfairness: of the late requests that have waited `starvation_seconds` for an iteration, one
at a time goes first, until it ends.
"""

from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain

from engine.policy.base import Policy, PolicyBase, Preemption, SortKey
from engine.policy.settings import PolicySettings
from engine.policy.waiting import MAX_AT_ONCE, STARVATION_SECONDS, WaitingTimes
from engine.ports import Cost
from engine.request import Request, RequestSpec
from engine.step import RequestId


class GoodputFirst(PolicyBase):
    """Two instances of one policy: `timely` orders the requests that meet the goal or still can,
    `late` those that do not."""

    def __init__(self, timely: Policy, late: Policy, cost: Cost, settings: PolicySettings) -> None:
        self._timely, self._late_policy = timely, late
        self._cost = cost
        self._goal = settings.ttft_goal
        self._waiting = WaitingTimes(settings.starvation_seconds or STARVATION_SECONDS)
        self._latest_starts: list[tuple[float, RequestId, Request]] = []  # a heap
        self._undecided: set[Request] = set()  # may still become late
        self._late: set[Request] = set()
        self._found_at: float | None = None
        self._first: Request | None = None  # the late request that goes first

    @property
    def preemption(self) -> Preemption:
        return self._timely.preemption

    def validate(self, spec: RequestSpec, num_tokens: int, now: float) -> None:
        self._timely.validate(spec, num_tokens, now)

    def arrive(self, request: Request, now: float) -> None:
        latest = request.times.arrived_at + self._goal
        first_at = request.times.first_token_at
        if (now if first_at is None else first_at) > latest:
            self._move_behind(request, now)
            return
        if first_at is None:
            start_by = latest - self._cost.compute(max(1, request.remaining), 0)
            heappush(self._latest_starts, (start_by, request.request_id, request))
            self._undecided.add(request)
        self._timely.arrive(request, now)

    def found(self, request: Request, num_tokens: int) -> bool:
        return self._policy_of(request).found(request, num_tokens)

    def start(self, request: Request) -> None:
        self._undecided.discard(request)
        self._policy_of(request).start(request)

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        if request in self._late:
            self._waiting.restart(request, now)
        self._policy_of(request).ran(request, num_tokens, seconds, now)

    def leave(self, request: Request, now: float) -> None:
        self._policy_of(request).leave(request, now)
        self._undecided.discard(request)
        self._late.discard(request)
        self._waiting.remove(request)
        if request is self._first:
            self._first = None

    def order(self, now: float) -> Iterator[Request]:
        self._find_late(now)
        if self._first is None:
            self._first = next(iter(self._waiting.starving(now, most=1)), None)
        first = self._first
        behind = (r for r in self._late_policy.order(now) if r is not first)
        order = chain(self._timely.order(now), behind)
        return order if first is None else chain([first], order)

    def started_order(
        self, started: Collection[Request], now: float, *, reverse: bool = False
    ) -> Iterator[Request]:
        first, late = self._first, [r for r in started if r in self._late]
        timely = [r for r in started if r not in self._late]
        front = [first] if first in late else []
        middle = self._timely.started_order(timely, now, reverse=reverse)
        back = self._late_policy.started_order(late, now, reverse=reverse)
        behind = (request for request in back if request is not first)
        return chain(behind, middle, front) if reverse else chain(front, middle, behind)

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        late = self._late
        timely_keys = iter(self._timely.sort_keys([r for r in requests if r not in late], now))
        late_keys = iter(self._late_policy.sort_keys([r for r in requests if r in late], now))
        keys = [(2, *next(late_keys)) if r in late else (1, *next(timely_keys)) for r in requests]
        return [(0,) if r is self._first else k for r, k in zip(requests, keys, strict=True)]

    def _policy_of(self, request: Request) -> Policy:
        return self._late_policy if request in self._late else self._timely

    def _find_late(self, now: float) -> None:
        """Move waiting requests that are late behind the others, a bounded number at a time."""
        if now == self._found_at:
            return
        self._found_at = now
        queue, left = self._latest_starts, MAX_AT_ONCE
        while queue and left and queue[0][0] < now:
            request = heappop(queue)[2]
            if request in self._undecided:
                left -= 1
                self._timely.leave(request, now)
                self._move_behind(request, now)

    def _move_behind(self, request: Request, now: float) -> None:
        self._undecided.discard(request)
        self._late.add(request)
        self._waiting.restart(request, now)
        self._late_policy.arrive(request, now)
