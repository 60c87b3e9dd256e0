"""Skip-join multi-level feedback queue (FastServe, section 4.1, algorithm 1).

Output lengths are unknown, so a request sinks as it runs: short answers finish in the high
queues, long ones give way. The first iteration is known from the prompt length, so a request
joins the highest queue whose quantum covers it and skips those it would only be demoted from.
"""

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.ports import Cost
    from engine.request import Request
    from engine.step import RequestId


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The quantum of the highest queue in seconds (None: one decode of one request), how much
    longer each next one is, and after how many seconds of waiting a request starves."""

    base_quantum: float | None = None
    ratio: float = 2.0
    num_levels: int = 16
    starvation_seconds: float = 3.0
    skips: bool = True


@dataclass(slots=True, eq=False)
class _Job:
    request: "Request"
    level: int
    quantum: float  # seconds granted in this level
    used: float
    waits_since: float


class SkipJoinMLFQ:
    """Queues from short to long quanta; inside a queue, first in, first out."""

    preempts = True

    def __init__(self, cost: "Cost", settings: QueueSettings | None = None) -> None:
        self._cost = cost
        self._settings = settings or QueueSettings()
        self._levels: list[dict[RequestId, _Job]] = [{} for _ in range(self._settings.num_levels)]
        self._jobs: dict[RequestId, _Job] = {}  # who waits longest comes first

    def arrive(self, request: "Request", now: float) -> None:
        level = self._level_for(self._next_iteration(request)) if self._settings.skips else 0
        job = _Job(request, level, self._quantum(level), used=0.0, waits_since=now)
        self._jobs[request.request_id] = job
        self._levels[level][request.request_id] = job

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        """Charge the iteration; demote who has used up the quantum of its queue."""
        job = self._jobs.pop(request.request_id)
        self._jobs[request.request_id] = job
        job.waits_since = now
        job.used += seconds
        if job.used >= job.quantum:
            covering = self._level_for(self._next_iteration(request))
            last = len(self._levels) - 1
            self._join(job, min(max(job.level + 1, covering), last))

    def leave(self, request: "Request", now: float) -> None:
        job = self._jobs.pop(request.request_id)
        del self._levels[job.level][request.request_id]

    def order(self, now: float) -> "Iterator[Request]":
        self._promote_the_starving(now)
        return (job.request for job in chain.from_iterable(map(dict.values, self._levels)))

    def level(self, request: "Request") -> int:
        """The queue that the request is in, 0 the highest."""
        return self._jobs[request.request_id].level

    def _promote_the_starving(self, now: float) -> None:
        starving = []
        for job in self._jobs.values():
            if now - job.waits_since < self._settings.starvation_seconds:
                break
            starving.append(job)
        for job in starving:
            self._join(job, 0)
            job.quantum = max(job.quantum, self._next_iteration(job.request))
            job.waits_since = now
            self._jobs[job.request.request_id] = self._jobs.pop(job.request.request_id)

    def _join(self, job: _Job, level: int) -> None:
        del self._levels[job.level][job.request.request_id]
        job.level, job.quantum, job.used = level, self._quantum(level), 0.0
        self._levels[level][job.request.request_id] = job

    def _next_iteration(self, request: "Request") -> float:
        return self._cost.compute(max(1, request.remaining), request.num_computed)

    def _quantum(self, level: int) -> float:
        base = self._settings.base_quantum or self._cost.compute(1, 1)
        return base * self._settings.ratio**level

    def _level_for(self, seconds: float) -> int:
        """The highest queue whose quantum covers so many seconds."""
        for level in range(len(self._levels)):
            if self._quantum(level) >= seconds:
                return level
        return len(self._levels) - 1
