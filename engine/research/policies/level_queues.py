"""LevelQueues: the requests of the Gittins index by the level of their rank.

Started ones are sorted by arrival in each level; waiting ones are in queues by kind, so that new
ranks cost as much as there are kinds, not requests.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from engine.research.policies.lengths import EDGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from engine.request import Request

NUM_LEVELS = 26  # level 0 is for requests that go first until they end
KINDS_PER_PLAN = 16  # so many waiting requests get new ranks in one plan
MAX_AT_ONCE = 64  # requests of a kind or level that starve at once, and so go first


class Kind(NamedTuple):
    """Waiting requests of one kind have the same rank."""

    stratum: int  # the stratum of prompt lengths in `LearnedLengths`
    prefill: int  # `prefill_class` of the units of their prompts
    cap: int  # bin of `max_tokens`


@dataclass(slots=True, eq=False)
class Job:
    """A live request. `number` counts up with each arrival."""

    number: int
    kind: Kind
    prefill: float  # units of prefill that are left
    age_bin: int = 0  # the bin of the next output token
    next_edge: int = EDGES[1]  # the least output length beyond that bin
    steady_until: int = 0  # output length before which a decode changes nothing else of the job
    level: int = 1
    version: int = -1  # the version of the ranks by which `level` was chosen
    is_started: bool = False
    is_first: bool = False  # goes first until it ends
    waits_since: float = 0.0

    @property
    def is_queued(self) -> bool:
        """Whether it is in a queue of its kind, behind the started ones of its level."""
        return not self.is_started and not self.is_first


class LevelQueues:
    """`level_of` gives the level of a job by the present ranks: of a waiting one, that of its
    kind."""

    def __init__(self, jobs: "Mapping[Request, Job]", level_of: "Callable[[Job], int]") -> None:
        self._jobs = jobs
        self._level_of = level_of
        self._waiting: dict[Kind, dict[Request, None]] = {}
        self._levels: dict[Kind, int] = {}  # the levels of waiting requests
        self._queued: list[dict[Kind, dict[Request, None]]] = [{} for _ in range(NUM_LEVELS)]
        self._outdated: list[Kind] = []  # kinds whose levels are by ranks of an earlier version
        self._started: list[list[tuple[int, Request]]] = [[] for _ in range(NUM_LEVELS)]

    @property
    def sizes(self) -> list[int]:
        """The number of requests in each level."""
        sizes = [len(started) for started in self._started]
        for kind, queue in self._waiting.items():
            sizes[self._levels[kind]] += len(queue)
        return sizes

    @property
    def is_up_to_date(self) -> bool:
        """Whether all levels are by the present ranks."""
        return not self._outdated

    @property
    def started(self) -> "list[Request]":
        """The requests that are not in the queue of a kind, by level and arrival."""
        return [request for _, request in chain.from_iterable(self._started)]

    def level(self, job: Job) -> int:
        """The level that a request is in."""
        return self._levels[job.kind] if job.is_queued else job.level

    def insert(self, request: "Request", job: Job) -> None:
        """Add a request to its level."""
        if not job.is_queued:
            job.level = self._level_of(job)
            insort(self._started[job.level], (job.number, request))
            return
        queue = self._waiting.get(job.kind)
        if queue is None:
            queue = self._waiting[job.kind] = {}
            level = self._levels[job.kind] = self._level_of(job)
            self._queued[level][job.kind] = queue
        queue[request] = None

    def remove(self, request: "Request", job: Job) -> None:
        """Take a request out of its level, before it becomes a started or a first one."""
        if not job.is_queued:
            started = self._started[job.level]
            del started[bisect_left(started, (job.number,))]
            return
        queue = self._waiting[job.kind]
        del queue[request]
        if not queue:
            del self._queued[self._levels.pop(job.kind)][job.kind], self._waiting[job.kind]

    def move(self, request: "Request", job: Job) -> None:
        """Move a started request to its level."""
        level = self._level_of(job)
        if level != job.level:
            self.remove(request, job)
            job.level = level
            insort(self._started[level], (job.number, request))

    def outdate(self) -> None:
        """There are new ranks."""
        self._outdated = [*self._waiting]

    def update(self) -> None:
        """Levels of waiting requests by the new ranks: of a few kinds in each plan, so that no plan
        takes long."""
        kinds = self._outdated[:KINDS_PER_PLAN]
        del self._outdated[:KINDS_PER_PLAN]
        for kind in kinds:
            queue = self._waiting.get(kind)
            if queue is not None:
                del self._queued[self._levels[kind]][kind]
                level = self._levels[kind] = self._level_of(self._jobs[next(iter(queue))])
                self._queued[level][kind] = queue

    def in_order(self) -> "Iterator[Request]":
        """All requests, the most urgent first."""
        jobs = self._jobs
        late = [request for _, request in self._started[0] if not jobs[request].is_started]
        for level, started in enumerate(self._started):
            for _, request in started:
                if level or jobs[request].is_started:
                    yield request
            if not level:
                yield from late
            if queues := self._queued[level]:
                yield from self._by_arrival([*queues.values()])

    def running_order(self, *, reverse: bool) -> "Iterator[tuple[tuple[int, int, int], Request]]":
        """The started requests with their sort keys, by level and arrival."""
        levels = [(level, [*found]) for level, found in enumerate(self._started) if found]
        step = -1 if reverse else 1
        return (
            ((level, 0, number), request)
            for level, found in levels[::step]
            for number, request in found[::step]
            if self._jobs[request].is_started
        )

    def starving(self, since: float) -> "list[Request]":
        """Requests that wait since that time or longer. Of a kind, the first to arrive is the first
        to starve; among started requests of a level, nearly so."""
        late: list[Request] = []
        for queue in self._waiting.values():
            late += takewhile(
                lambda request: self._jobs[request].waits_since <= since,
                islice(queue, MAX_AT_ONCE),
            )
        for started in self._started[1:]:
            first = islice(started, MAX_AT_ONCE)
            late += [request for _, request in first if self._jobs[request].waits_since <= since]
        return late

    def _by_arrival(self, queues: "Sequence[Iterable[Request]]") -> "Iterator[Request]":
        if len(queues) == 1:
            return iter(queues[0])
        return merge(*queues, key=lambda request: self._jobs[request].number)
