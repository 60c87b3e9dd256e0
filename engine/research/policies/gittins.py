"""The Gittins index over learned output lengths, with the tail of first come, first served.

In an M/G/1 queue with unknown sizes the Gittins policy has the least mean response time (Gittins
1979; Scully, Grosof and Harchol-Balter 2020). It serves the request of lowest *rank*: the least,
over horizons D, of the work expected within the next D tokens for each request that ends in them,

    rank = min over D of (prefill + E[min(S - a, D)]) / P(S - a <= D),

with output length S and a tokens produced, in units of a decode step without other requests. If
output lengths are alike, ranks fall with age and the order is first come, first served. If they
are skewed, ranks rise with age and short outputs overtake long ones. The distribution of S is
learned (`LearnedLengths`). Until `min_outputs` outputs have ended the order is FCFS, and so it is
while the work of requests varies too little for another order to gain (`WorkVariation`).

Against needless preemption, the rank of a started request is halved, ranks are grouped into levels
a factor of `LEVEL_RATIO` apart, and within a level started requests precede waiting ones.

A low mean is not to be paid with a long tail. Beside the real schedule, `FcfsShadow` makes that of
FCFS. A request goes first until it ends once its tokens are, or would be, later than there by more
than `fcfs_slack` times its age: before all others, so that where prompts take most of the time the
order is nearly FCFS. So no JCT is much longer than 1 + `fcfs_slack` times that under FCFS; what the
index has to give are the slack, and the seats of requests that ended sooner than under FCFS. With
`starvation_seconds` instead, a request that waits so long for an iteration goes first.
"""

from heapq import merge
from math import floor, inf, log
from operator import itemgetter
from typing import TYPE_CHECKING

from engine.policy.base import PolicyBase
from engine.policy.port import Preemption
from engine.policy.settings import PolicySettings
from engine.request import Abort, FinishReason
from engine.research.policies.fcfs_shadow import FcfsShadow
from engine.research.policies.lengths import EDGES, NUM_BINS, LearnedLengths, bin_of, stratum_of
from engine.research.policies.level_queues import NUM_LEVELS, Job, Kind, LevelQueues
from engine.research.policies.rank import LearnedRanks, prefill_class, units_of
from engine.research.policies.work_variation import WorkVariation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from engine.policy.port import Policy, SortKey
    from engine.ports import Cost
    from engine.request import Request

LEVEL_RATIO = 1.5
LOG_RATIO = log(LEVEL_RATIO)
STARTED = 0.5  # factor on the rank of a started request
ENDS_PER_UPDATE = 16  # ended outputs between two computations of the ranks,
SHARE_PER_UPDATE = 0.125  # but not before so many more than were known,
SECONDS_PER_UPDATE = 1.0  # or after this time
FOREVER = 1 << 62  # an output length


class GittinsIndex(PolicyBase):
    """Requests by the level of their rank."""

    preemption = Preemption.ALWAYS

    def __init__(self, cost: "Cost", settings: PolicySettings | None = None) -> None:
        self._cost = cost
        self._settings = settings or PolicySettings()
        self._unit = cost.compute(1, 0)
        self.lengths = LearnedLengths()
        self._fcfs = FcfsShadow(self._settings.seats)
        self.variation = WorkVariation(self._settings.min_outputs)
        self._is_ranked = False  # else the order is FCFS
        self._jobs: dict[Request, Job] = {}
        self._num_arrived = 0
        self._queues = LevelQueues(self._jobs, self._level_of)
        self._new: dict[Request, None] = {}  # have KV, and were not in an iteration yet
        self._ranks = LearnedRanks(self.lengths)
        self._num_ends = 0  # outputs that ended since the last update
        self._update_at = 0.0
        self._ordered_at: float | None = None

    def arrive(self, request: "Request", now: float) -> None:
        prefill = self._prefill(request)
        stratum = stratum_of(request.prompt_len)
        kind = Kind(stratum, prefill_class(prefill), bin_of(max(1, request.spec.max_tokens)))
        job = Job(self._num_arrived, kind, prefill, waits_since=now)
        self._jobs[request] = job
        self._fcfs.arrive(request, self._added(prefill))
        self._num_arrived += 1
        job.age_bin = bin_of(request.produced + 1)
        job.next_edge = EDGES[job.age_bin + 1]
        job.is_started = bool(request.num_computed or request.output)
        self._queues.insert(request, job)

    def learn_with(self, other: "Policy") -> None:
        """Share what is learned with another instance."""
        assert isinstance(other, GittinsIndex), "the same policy"
        self.lengths, self.variation = other.lengths, other.variation

    def start(self, request: "Request") -> None:
        if not self._jobs[request].is_started:
            self._new[request] = None

    def ran(self, request: "Request", num_tokens: int, seconds: float, now: float) -> None:
        job = self._jobs[request]
        job.waits_since = now
        is_steady = len(request.output) < job.steady_until and job.version == self._ranks.version
        if is_steady and num_tokens == 1:  # the common case
            self._fcfs.decoded(seconds, now)
            return
        before = after = 0.0  # seconds of prefill that are left
        if job.prefill or num_tokens > 1:
            units = self._units(request.remaining + num_tokens, request.num_computed - num_tokens)
            job.prefill = self._prefill(request)
            before, after = self._added(units), self._added(job.prefill)
        if not job.is_started:
            self._fcfs.start(request, before)
        if before:
            self._fcfs.computed(request, after)
        self._fcfs.ran(before - after, seconds, now)
        self._age(job, len(request.output) + 1)
        if job.is_started:
            self._queues.move(request, job)
        else:
            self._new.pop(request, None)
            self._queues.remove(request, job)
            job.is_started = True
            self._queues.insert(request, job)
        if job.prefill:
            job.steady_until = 0
        else:  # its age matters to its level, else only to what is learned: once in a version
            uses_age = self._is_ranked and not job.is_first
            job.steady_until = job.next_edge - 1 if uses_age else FOREVER

    def leave(self, request: "Request", now: float) -> None:
        job = self._jobs.pop(request)
        self._fcfs.leave(request)
        self._queues.remove(request, job)
        self._new.pop(request, None)
        if request.output:
            self._age(job, request.produced)
        is_complete = request.finish is FinishReason.STOP or request.abort is Abort.STOP_STRING
        if is_complete and not request.spec.is_pooling:
            self.lengths.ended(job.kind.stratum, bin_of(max(1, request.produced)))
            self._num_ends += 1
        if request.finish is not None:
            prefill = self._added(units_of(job.kind.prefill))
            self.variation.ended(prefill + request.produced * self._fcfs.decode_seconds)

    def order(self, now: float) -> "Iterator[Request]":
        if now != self._ordered_at:
            self._ordered_at = now
            ends = max(ENDS_PER_UPDATE, SHARE_PER_UPDATE * self.lengths.num_observed)
            if (self._num_ends >= ends or now >= self._update_at) and self._queues.is_up_to_date:
                self._update(now)
            self._queues.update()
            self._find_late(now)
        return self._queues.in_order()

    def started_order(
        self, started: "Collection[Request]", now: float, *, reverse: bool = False
    ) -> "Iterator[Request]":
        ran = self._queues.running_order(reverse=reverse)
        new = sorted(
            zip(self.sort_keys([*self._new], now), self._new, strict=True), reverse=reverse
        )
        return (request for _, request in merge(ran, new, key=itemgetter(0), reverse=reverse))

    def sort_keys(self, requests: "Sequence[Request]", now: float) -> "list[SortKey]":
        jobs = [self._jobs[request] for request in requests]
        keys: list[SortKey] = []
        for job in jobs:
            if job.is_first and not job.is_started:
                keys.append((0, 1, job.number))
            else:
                keys.append((self._queues.level(job), 2 * job.is_queued, job.number))
        return keys

    @property
    def level_sizes(self) -> list[int]:
        """The number of live requests in each level; level 0 has those that go first until they
        end."""
        return self._queues.sizes

    def level(self, request: "Request") -> int:
        """The level that the request is in."""
        return self._queues.level(self._jobs[request])

    # Ranks

    def _prefill(self, request: "Request") -> float:
        """Units of the prompt tokens that are left."""
        return self._units(request.remaining, request.num_computed)

    def _units(self, num_tokens: int, start: int) -> float:
        """Units of so many tokens behind `start` others; 0 if only one token is left."""
        return self._cost.compute(num_tokens, start) / self._unit if num_tokens > 1 else 0.0

    def _level_of(self, job: Job) -> int:
        """The level of the job's rank, which is halved if it is started."""
        if not job.is_queued:
            job.version = self._ranks.version
        if job.is_first:
            return 0
        if not self._is_ranked:
            return 1
        prefill = prefill_class(job.prefill) if job.prefill else 0
        rank = self._ranks.rank(job.kind.stratum, job.age_bin, prefill, job.kind.cap)
        level = 1 + floor(log((STARTED if job.is_started else 1.0) * rank) / LOG_RATIO)
        return min(max(1, level), NUM_LEVELS - 1)

    def _age(self, job: Job, length: int) -> None:
        """The request's output reaches this length: it is longer than all bins before."""
        while length >= job.next_edge:
            self.lengths.passed(job.kind.stratum, job.age_bin)
            job.age_bin += 1
            job.next_edge = EDGES[job.age_bin + 1] if job.age_bin + 1 < NUM_BINS else FOREVER

    def _update(self, now: float) -> None:
        """Compute ranks from what was learned."""
        self._num_ends = 0
        limit = self._settings.starvation_seconds
        self._update_at = now + min(SECONDS_PER_UPDATE, limit / 8 if limit else inf)
        self._ranks.renew(self.lengths)
        is_learned = self.lengths.num_observed >= self._settings.min_outputs
        if self._is_ranked != (is_learned and self.variation.is_large):
            self._is_ranked = not self._is_ranked
            self._sort_started()
        self._queues.outdate()

    def _sort_started(self) -> None:
        """Started requests to their levels, which those that do not run keep otherwise."""
        for request in self._queues.started:
            job = self._jobs[request]
            self._queues.remove(request, job)
            if job.is_started:
                self._age(job, len(request.output) + 1)
            self._queues.insert(request, job)
            job.steady_until = 0

    def _added(self, prefill: float) -> float:
        """Seconds that so many units of prefill add to iterations with other requests."""
        return max(0.0, prefill - 1.0) * self._unit

    def _find_late(self, now: float) -> None:
        """Requests that are late go first from now on."""
        limit = self._settings.starvation_seconds
        if limit is not None:
            late = self._queues.starving(now - limit)
        elif self._is_ranked:
            late = self._fcfs.lagging(self._settings.fcfs_slack, now)
        else:
            return
        for request in late:
            self._fcfs.goes_first(request)
            job = self._jobs[request]
            self._queues.remove(request, job)
            job.is_first = True
            self._queues.insert(request, job)
