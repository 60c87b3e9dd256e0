"""Skip-join multi-level feedback queue (FastServe, section 4.1, algorithm 1).

Output lengths are unknown, so a request sinks as it runs: short answers finish in the high
queues, long ones give way. The first iteration is known from the prompt length, so a request
joins the highest queue whose quantum covers it and skips those it would only be demoted from.
"""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from engine.policy.settings import PolicySettings
from engine.policy.waiting import WaitingTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.ports import Cost
    from engine.request import Request, RequestSpec

STARVATION_SECONDS = 3.0  # of the paper's released code


@dataclass(slots=True, eq=False)
class _Job:
    level: int
    quantum: float  # seconds granted in this level
    used: float = 0.0


class SkipJoinMLFQ:
    """Queues from short to long quanta; inside a queue, first in, first out.

    Preemption needs no act of its own: every iteration is taken from the front of the order.
    """

    preempts = True

    def __init__(self, cost: "Cost", settings: PolicySettings | None = None) -> None:
        self._cost = cost
        self._settings = settings or PolicySettings()
        self._levels: list[dict[Request, None]] = [{} for _ in range(self._settings.num_levels)]
        self._jobs: dict[Request, _Job] = {}
        self._patience = WaitingTimes(self._settings.starvation_seconds or STARVATION_SECONDS)

    def validate(self, spec: "RequestSpec", num_tokens: int, now: float) -> None:
        return None

    def arrive(self, request: "Request", now: float) -> None:
        level = self._covering(self._next_iteration(request)) if self._settings.skips else 0
        self._jobs[request] = _Job(level, self._quantum(level))
        self._levels[level][request] = None
        self._patience.watch(request, now)

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        """Charge the iteration; demote who has used up the quantum of its queue."""
        self._patience.watch(request, now)
        job = self._jobs[request]
        job.used += seconds
        if job.used >= job.quantum:
            covering = self._covering(self._next_iteration(request))
            last = len(self._levels) - 1
            self._join(request, min(max(job.level + 1, covering), last))

    def leave(self, request: "Request", now: float) -> None:
        del self._levels[self._jobs.pop(request).level][request]
        self._patience.forget(request)

    def order(self, now: float) -> "Iterator[Request]":
        for request in self._patience.starving(now):
            job = self._join(request, 0)
            job.quantum = max(job.quantum, self._next_iteration(request))
        return chain.from_iterable(self._levels)

    def next_scheduled_times(self, requests: "Sequence[Request]", now: float) -> list[float]:
        """Seconds until each is promoted for starving, or those above it have sunk to its queue,
        whichever is sooner (FastServe, section 4.3); in a queue, those before it use their quanta.
        """
        turns: dict[Request, float] = dict.fromkeys(requests, 0.0)
        num_above, above = 0, 0.0  # and the seconds that they take to sink to the level
        for level, queue in enumerate(self._levels):
            share = self._quantum(level) / self._settings.seats
            for place, request in enumerate(queue):
                if request in turns:
                    turns[request] = above + place * share
            num_above += len(queue)
            above += num_above * share
        return [min(self._patience.left(r, now), turn) for r, turn in turns.items()]

    def level(self, request: "Request") -> int:
        """The queue that the request is in, 0 the highest."""
        return self._jobs[request].level

    def _join(self, request: "Request", level: int) -> _Job:
        """Go to the end of a queue, with all of its quantum."""
        job = self._jobs[request]
        del self._levels[job.level][request]
        job.level, job.quantum, job.used = level, self._quantum(level), 0.0
        self._levels[level][request] = None
        return job

    def _next_iteration(self, request: "Request") -> float:
        """Seconds of all that the request has to have computed before its next token."""
        return self._cost.compute(max(1, request.remaining), request.num_computed)

    def _quantum(self, level: int) -> float:
        base = self._settings.base_quantum or self._cost.compute(1, 0)
        return base * self._settings.ratio**level

    def _covering(self, seconds: float) -> int:
        """The highest queue whose quantum covers so many seconds; the lowest if none does."""
        quantum = self._quantum(0)
        for level in range(len(self._levels) - 1):
            if quantum >= seconds:
                return level
            quantum *= self._settings.ratio
        return len(self._levels) - 1
