"""Requests ordered by `RequestSpec.priority`: lower values first, as in vLLM, then by arrival."""

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain

from engine.policy.base import PolicyBase, Preemption, SortKey
from engine.policy.settings import PolicySettings
from engine.policy.waiting import STARVATION_SECONDS, WaitingTimes
from engine.ports import Cost
from engine.request import Request


class LowestPriorityFirst(PolicyBase):
    """Strict priority classes with a starvation limit: a request that starves is promoted before
    all classes, behind those promoted earlier, until it ends."""

    preemption = Preemption.ALWAYS

    def __init__(self, cost: Cost | None = None, settings: PolicySettings | None = None) -> None:
        limit = (settings or PolicySettings()).starvation_seconds or STARVATION_SECONDS
        self._waiting = WaitingTimes(limit)
        self._promoted: dict[Request, SortKey] = {}
        self._classes: dict[int, dict[Request, SortKey]] = {}
        self._num_queued = 0  # arrivals and promotions so far
        self._priorities: list[int] = []  # the priorities of the classes, ascending

    def arrive(self, request: Request, now: float) -> None:
        priority = request.spec.priority
        if priority not in self._classes:
            self._classes[priority] = {}
            insort(self._priorities, priority)
        self._classes[priority][request] = (1, priority, self._next_number())
        self._waiting.restart(request, now)

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        if request not in self._promoted:
            self._waiting.restart(request, now)

    def leave(self, request: Request, now: float) -> None:
        self._waiting.remove(request)
        if request in self._promoted:
            del self._promoted[request]
        else:
            self._remove(request)

    def order(self, now: float) -> Iterator[Request]:
        for request in self._waiting.starving(now):
            self._waiting.remove(request)
            self._remove(request)
            self._promoted[request] = (0, self._next_number())
        classes = [self._classes[priority] for priority in self._priorities]
        return chain(self._promoted, chain.from_iterable(classes))

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        promoted, classes = self._promoted, self._classes
        return [promoted.get(r) or classes[r.spec.priority][r] for r in requests]

    def _next_number(self) -> int:
        self._num_queued += 1
        return self._num_queued

    def _remove(self, request: Request) -> None:
        priority = request.spec.priority
        del self._classes[priority][request]
        if not self._classes[priority]:
            del self._classes[priority]
            self._priorities.remove(priority)
