"""Skip-join multi-level feedback queue (FastServe, section 4.1, algorithm 1).

Output lengths are unknown, so a request is demoted as it runs: requests with short outputs finish
in the high queues before those with long outputs run. The time of the first iteration is known
from the prompt length, so a request joins the highest queue whose quantum covers it and skips the
queues from which it would be demoted at once.

A request is charged its own cost, what its tokens would take in iterations without other requests:
a shared iteration takes longer the more requests and prompts are in it, which says nothing about
the request. Chunks of a prompt are charged what they add to the prompt's time as a whole, and a
request that skipped queues is not demoted before its first token.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from engine.policy.base import PolicyBase, Preemption, SortKey
from engine.policy.settings import PolicySettings
from engine.policy.waiting import WaitingTimes
from engine.ports import Cost
from engine.request import Request

# examples/benchmarks/results/policies/README.md: `mlfq` beside `mlfq, 3 s`, which is the limit of
# the released code of the paper and under overload swaps until the mean is ten times FCFS's.
STARVATION_SECONDS = 30.0
# Of a queue, for which next scheduled times are computed exactly; swept in results/constants
MAX_PLACES = 1024


@dataclass(slots=True, eq=False)
class _Job:
    level: int
    quantum: float  # seconds granted in this level
    number: int = 0  # counts up with each request that joins a queue
    used: float = 0.0
    is_started: bool = False


class SkipJoinMLFQ(PolicyBase):
    """Queues from short to long quanta; inside a queue, first in, first out.

    There is no explicit preemption: every iteration is planned from the front of the order.
    """

    preemption = Preemption.IF_SWAPPED

    def __init__(self, cost: Cost, settings: PolicySettings | None = None) -> None:
        self._cost = cost
        self._settings = settings or PolicySettings()
        self._levels: list[dict[Request, None]] = [{} for _ in range(self._settings.num_levels)]
        self._jobs: dict[Request, _Job] = {}
        self._num_joined = 0
        self._started: list[tuple[int, int, Request]] = []  # by level and number, sorted
        self._decode_at: float | None = None  # when these were predicted: a decode at position 0,
        self._decode_cost = self._decode_slope = 0.0  # and the seconds per position
        self._waiting = WaitingTimes(self._settings.starvation_seconds or STARVATION_SECONDS)

    def arrive(self, request: Request, now: float) -> None:
        level = self._covering(self._next_iteration(request)) if self._settings.skips else 0
        self._jobs[request] = _Job(level, self._quantum(level), self._next_number())
        self._levels[level][request] = None
        self._waiting.restart(request, now)

    def start(self, request: Request) -> None:
        job = self._jobs[request]
        if not job.is_started:
            job.is_started = True
            insort(self._started, (job.level, job.number, request))

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        """Charge the tokens; demote the request if it has used up the quantum of its queue."""
        self._waiting.restart(request, now)
        job = self._jobs[request]
        if num_tokens == 1 and now == self._decode_at and request.output:  # the common case
            job.used += self._decode_cost + self._decode_slope * (request.num_computed - 1)
        else:
            job.used += self._own_cost(request, num_tokens, now)
        if job.used < job.quantum:
            return
        if not request.remaining or not self._settings.skips:
            covering = self._covering(self._next_iteration(request))
            last = len(self._levels) - 1
            self._join(request, min(max(job.level + 1, covering), last))

    def leave(self, request: Request, now: float) -> None:
        job = self._jobs.pop(request)
        del self._levels[job.level][request]
        if job.is_started:
            del self._started[bisect_left(self._started, (job.level, job.number))]
        self._waiting.remove(request)

    def order(self, now: float) -> Iterator[Request]:
        for request in self._waiting.starving(now):
            job = self._join(request, 0)
            job.quantum = max(job.quantum, self._next_iteration(request))
        return chain.from_iterable(self._levels)

    def started_order(
        self, started: Collection[Request], now: float, *, reverse: bool = False
    ) -> Iterator[Request]:
        in_order = self._started[::-1] if reverse else self._started[:]
        return (request for _, _, request in in_order)

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        jobs = [self._jobs[request] for request in requests]
        return [(job.level, job.number) for job in jobs]

    def next_scheduled_times(self, requests: Sequence[Request], now: float) -> list[float]:
        """Seconds until each request is promoted for starving, or until all requests in higher
        queues are demoted to its queue, whichever is sooner (FastServe, section 4.3). In its queue
        the requests before it use up their quanta first.
        """
        levels = [self._jobs[request].level for request in requests]
        wanted: list[set[Request]] = [set() for _ in self._levels]
        for request, level in zip(requests, levels, strict=True):
            wanted[level].add(request)
        seconds: dict[Request, float] = {}
        num_above, above = 0, 0.0  # requests in higher queues, and seconds until they are demoted
        for level, queue in enumerate(self._levels):
            share = self._quantum(level) / self._settings.seats
            if wanted[level]:
                seconds |= _walk(queue, wanted[level], above, share)
            num_above += len(queue)
            above += num_above * share
        return [min(self._waiting.seconds_left(r, now), seconds[r]) for r in requests]

    @property
    def level_sizes(self) -> list[int]:
        """The number of live requests in each queue, the highest first."""
        return [len(queue) for queue in self._levels]

    def level(self, request: Request) -> int:
        """The queue that the request is in, 0 the highest."""
        return self._jobs[request].level

    def _join(self, request: Request, level: int) -> _Job:
        """Move the request to the end of a queue, with the queue's whole quantum."""
        job = self._jobs[request]
        del self._levels[job.level][request]
        if job.is_started:
            del self._started[bisect_left(self._started, (job.level, job.number))]
        job.level, job.quantum, job.used = level, self._quantum(level), 0.0
        job.number = self._next_number()
        self._levels[level][request] = None
        if job.is_started:
            insort(self._started, (job.level, job.number, request))
        return job

    def _next_number(self) -> int:
        self._num_joined += 1
        return self._num_joined

    def _own_cost(self, request: Request, num_tokens: int, now: float) -> float:
        """Seconds of these tokens, the last computed ones, without other requests.

        Of a prompt, the difference that they make to its time as a whole. The cost of a decode is
        linear in its position, so two predictions per iteration do for all its decodes.
        """
        stop = request.num_computed
        start = stop - num_tokens
        if num_tokens > 1 or not request.output:
            before = self._cost.compute(start, 0) if start else 0.0
            return self._cost.compute(stop, 0) - before
        if now != self._decode_at:
            self._decode_at = now
            self._decode_cost = self._cost.compute(1, 0)
            self._decode_slope = self._cost.compute(1, 1) - self._decode_cost
        return self._decode_cost + self._decode_slope * start

    def _next_iteration(self, request: Request) -> float:
        """Seconds to compute all tokens of the request up to its next output token."""
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


def _walk(
    queue: Iterable[Request], wanted: set[Request], above: float, share: float
) -> dict[Request, float]:
    """Seconds until these requests of a queue run, if each one before them takes `share`. Requests
    beyond `MAX_PLACES` are not looked for: they count as next after those."""
    seconds: dict[Request, float] = {}
    for place, request in enumerate(islice(queue, MAX_PLACES)):
        if request in wanted:
            seconds[request] = above + place * share
            if len(seconds) == len(wanted):
                return seconds
    return dict.fromkeys(wanted, above + MAX_PLACES * share) | seconds
