"""FcfsShadow: the schedule that first come, first served would make of the same requests.

The fair sojourn protocol (Friedman and Henderson, SIGMETRICS 2003) runs processor sharing beside
the real schedule, and serves first what would have ended first in it, so that no request ends later
than under processor sharing. Here FCFS runs beside it, with the same seats. A round of its decodes
takes as long as the decodes of a real iteration; prompts take what they take in real iterations.

Lengths of outputs are learned from the real schedule. In the shadow a request keeps its seat while
its length is not known; when it ends, its seat has been free since the round in which the shadow
would have produced its last token, and the next request starts as of that round. So the shadow is
exact as long as the requests in it do not lag far behind.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request

MEMORY = 0.999  # factor of earlier work and seconds, per iteration
# The decodes of an iteration are assumed to take at least this share of its seconds
MIN_SHARE = 0.02


@dataclass(slots=True, eq=False)
class _Job:
    request: "Request | None"  # None once it has ended
    prefill: float  # seconds that its prompt adds to iterations, as far as they are left
    expected: float  # seconds of the prompt if nothing of it is cached
    left: float  # seconds that are left in the real schedule
    produced: int  # tokens before it arrived
    arrived: int  # round
    delay: int = 0  # rounds from when it could start until it got a seat
    started: int = 0  # round before its first token, from when it is served on
    length: int | None = None  # tokens that it produced here, once it has ended
    is_first: bool = False  # goes first in the real schedule


class FcfsShadow:
    """An iteration costs as much as requests start or end in it; `lagging` as much as there are
    seats."""

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._free = [0] * seats  # a heap: since which round each free seat is free
        self._jobs: dict[Request, _Job] = {}
        self._queue: deque[_Job] = deque()
        self._prefills: deque[_Job] = deque()  # have a seat, in order of arrival
        self._served: dict[_Job, None] = {}  # have a seat, and their prompt is computed,
        self._watched: dict[_Job, None] = {}  # and are not known to be late, or have prefill left
        self._ends: list[tuple[int, int, _Job]] = []  # a heap of known ends, by round
        self._num_ends = 0
        self._round = 0
        self._computed = self._expected = 0.0  # seconds of prompts, with and without the cache
        self._budget = 0.0  # seconds that are not spent yet; below 0 if an iteration took more
        self._chunk = 0.0  # seconds of prefill in an iteration
        self._returned_at: float | None = None  # when the latest real iteration returned,
        self._last_seconds = self._last_prefill = 0.0  # and what it took
        # Sums over recent iterations
        self._seconds = self._prefill = self._decodes = self._rounds = 0.0

    @property
    def decode_seconds(self) -> float:
        """What a decode adds to an iteration: the time of recent ones without prefill, by the
        number of decodes."""
        if not self._decodes:
            return 0.0
        return max(self._seconds - self._prefill, MIN_SHARE * self._seconds) / self._decodes

    def arrive(self, request: "Request", prefill: float) -> None:
        """`prefill`: seconds that its prompt adds to iterations, if nothing of it is cached."""
        share = self._computed / self._expected if self._expected else 1.0
        cost = share * prefill
        job = _Job(request, cost, prefill, cost, request.produced, self._round)
        self._jobs[request] = job
        self._queue.append(job)
        self._fill()

    def start(self, request: "Request", prefill: float) -> None:
        """The request starts in the real schedule, so that it is known what is cached."""
        job = self._jobs[request]
        job.left = prefill
        self._computed = self._computed * MEMORY + prefill
        self._expected = self._expected * MEMORY + job.expected
        if job in self._served:
            return
        job.prefill = prefill if job not in self._prefills else min(job.prefill, prefill)

    def leave(self, request: "Request") -> None:
        """The request has ended, so that its length is known."""
        job = self._jobs.pop(request)
        job.request, job.length = None, request.produced - job.produced
        self._watched.pop(job, None)
        if not self._jobs:  # then FCFS has nothing left to do either
            self._reset()
        elif job in self._served:
            self._push(job)
            self._release()

    def _reset(self) -> None:
        self._free = [self._round] * self._seats
        for queue in (self._queue, self._prefills, self._served, self._watched, self._ends):
            queue.clear()
        self._budget = 0.0

    def computed(self, request: "Request", left: float) -> None:
        """A part of the request's prompt was computed; `left` seconds of prefill are left."""
        job = self._jobs[request]
        job.left = left
        self._unwatch(job)

    def goes_first(self, request: "Request") -> None:
        """The request goes first until it ends: it is not reported as lagging again."""
        job = self._jobs[request]
        job.is_first = True
        self._unwatch(job)

    def _unwatch(self, job: _Job) -> None:
        if job.is_first and not job.left:
            self._watched.pop(job, None)

    def ran(self, prefill: float, seconds: float, now: float) -> None:
        """One request of a real iteration got `prefill` seconds of prefill done, or 0 and a decode.
        The iteration of `seconds` returned at `now`; this is called for each request in it."""
        if now != self._returned_at:
            self._returned(seconds, now)
        self._last_prefill += prefill
        self._prefill += prefill
        self._decodes += 1.0

    def decoded(self, seconds: float, now: float) -> None:
        """`ran` without prefill."""
        if now != self._returned_at:
            self._returned(seconds, now)
        self._decodes += 1.0

    def _returned(self, seconds: float, now: float) -> None:
        """A real iteration returns: the shadow advances by the time of the one before."""
        self._advance(self._last_seconds, self._last_prefill)
        self._returned_at = now
        self._last_seconds, self._last_prefill = seconds, 0.0
        self._seconds = self._seconds * MEMORY + seconds
        self._prefill *= MEMORY
        self._decodes *= MEMORY
        self._rounds = self._rounds * MEMORY + 1.0

    def lagging(self, slack: float, now: float) -> "list[Request]":
        """Requests that are, or would be, further behind the shadow than `slack` times their age,
        without those that go first.

        Of those with a first token there, those that are behind by so many decodes. Of those whose
        prompt is being computed there, those that have to go first now, because it takes longer to
        compute what is left of these prompts here, in order of arrival, than in the shadow. An
        iteration is not interrupted, so they go first one iteration early."""
        pace = self._seconds / (self._rounds or 1.0)
        found: list[Request] = []
        here, there = self._last_seconds, 0.0  # seconds of prefill until a request's first token
        for job in self._watched:
            request = job.request
            assert request is not None, "an ended request is not watched"
            here += job.left
            lag = self._round - job.started - (len(request.output) - job.produced)
            age = now - request.times.arrived_at
            if lag > 0 and not job.is_first and lag * pace > slack * age:
                found.append(request)
        unfinished: list[Request] = []
        for job in self._prefills:
            there += job.prefill
            if job.request is None or not job.left:
                continue
            here += job.left
            if not job.is_first:
                unfinished.append(job.request)
            if here > there + slack * (now - job.request.times.arrived_at):
                found += unfinished
                unfinished.clear()
        return found

    def _advance(self, seconds: float, prefill: float) -> None:
        """Iterations of the shadow in the time of a real one: each is a round of decodes and, if
        prompts have seats, a chunk of prefill as long as recent ones."""
        self._chunk = max(prefill, self._chunk * MEMORY)
        self._budget += seconds
        decodes = max(seconds - prefill, MIN_SHARE * seconds)
        while self._budget > 0.0 and (self._served or self._prefills):
            self._budget -= decodes
            if self._prefills:
                self._budget -= self._compute_prompts(self._chunk)
            self._round += 1
            if self._ends:
                self._release()
        self._budget = min(self._budget, 0.0)

    def _compute_prompts(self, seconds: float) -> float:
        """Spend at most so many seconds on prompts, in order of arrival; returns what is spent."""
        left = seconds
        while self._prefills and left > 0.0:
            job = self._prefills[0]
            spent = min(left, job.prefill)
            job.prefill -= spent
            left -= spent
            if job.prefill <= 0.0:
                self._serve(self._prefills.popleft())
        return seconds - left

    def _fill(self) -> None:
        """Seats to the requests that arrived first."""
        while self._queue and self._free:
            job = self._queue.popleft()
            job.delay = self._round - max(heappop(self._free), job.arrived)
            if job.prefill > 0.0:
                self._prefills.append(job)
            else:
                self._serve(job)

    def _serve(self, job: _Job) -> None:
        job.started = self._round - job.delay
        self._served[job] = None
        if job.request is not None and (job.left or not job.is_first):
            self._watched[job] = None
        if job.length is not None:
            self._push(job)

    def _push(self, job: _Job) -> None:
        assert job.length is not None, "only a request that has ended has an end here"
        self._num_ends += 1
        heappush(self._ends, (job.started + job.length, self._num_ends, job))

    def _release(self) -> None:
        """Take the seats of requests whose end the shadow has reached."""
        while self._ends and self._ends[0][0] <= self._round:
            end, _, job = heappop(self._ends)
            del self._served[job]
            heappush(self._free, end)
            self._fill()
