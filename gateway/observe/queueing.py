"""QueueWatch: how long the queue has been blocked by which shortage.

After each plan the oldest waiting request shows what ended the plan. The time until the next plan
is added to that cause, so the difference between two readings says why a request waited in between,
however many requests wait.
"""

from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.request import Request, State

MAX_SEARCH = 1024  # live requests among which a waiting one is looked for


class Cause(StrEnum):
    """What a waiting request lacks."""

    KV = "KV"
    SEAT = "a seat"
    TOKENS = "tokens of a step"
    WORKER = "the worker's restart"
    STEP = "the step in flight"  # it arrived while a step ran


WAITING, STEP = State.WAITING, Cause.STEP  # bound once (see engine.pool)


class Pressure(NamedTuple):
    """The load while requests waited."""

    num_waiting: int
    num_running: int
    kv_share: float  # the share of the blocks that are held, 0 to 1


class QueueWatch:
    """Seconds for which requests waited, by cause."""

    def __init__(self, scheduler: IterationScheduler) -> None:
        self._scheduler = scheduler
        self._seconds = dict.fromkeys(Cause, 0.0)
        self._cause = Cause.STEP
        self._since = 0.0
        self.pressure = Pressure(0, 0, 0.0)  # after the last plan that left requests waiting

    def seconds(self, now: float) -> dict[Cause, float]:
        """Seconds by cause since the start of the server."""
        self._seconds[self._cause] += now - self._since
        self._since = now
        return dict(self._seconds)

    def planned(self, num_requests: int, now: float) -> None:
        """A plan put `num_requests` requests into an iteration; 0 if none could be planned."""
        self._begin(self._blocked_by(num_requests), now)

    def worker_lost(self, now: float) -> None:
        """Until the next plan, requests wait for the new worker."""
        self._begin(Cause.WORKER, now)

    def _begin(self, cause: Cause, now: float) -> None:
        if cause is not self._cause:
            self._seconds[self._cause] += now - self._since
            self._cause, self._since = cause, now

    def _blocked_by(self, num_requests: int) -> Cause:
        scheduler = self._scheduler
        pool = scheduler.pool
        num_waiting = pool.count(WAITING)
        if not num_waiting:
            return STEP
        held = scheduler.kv_counts.device.held / scheduler.kv.shape.num_blocks
        self.pressure = Pressure(num_waiting, pool.num_admitted, held)
        oldest = next((each for each in islice(pool, MAX_SEARCH) if each.state is WAITING), None)
        return Cause.TOKENS if oldest is None else lacks(oldest, scheduler, num_requests)


def lacks(request: Request, scheduler: IterationScheduler, num_requests: int) -> Cause:
    """What a waiting request lacks, given that the last iteration had `num_requests` requests.

    Changes nothing: blocks that the request may share count only once the scheduler found them.
    """
    kv = scheduler.kv
    grows = scheduler.settings.admission is Admission.GROW
    slots = request.num_tokens if grows else request.spec.max_slots
    headroom = scheduler.pool.num_admitted * len(kv.groups) if grows else 0
    found = request.block_hashes[: request.found.num_matched]
    if kv.missing(request, slots, found).blocks + headroom > 0:
        return Cause.KV
    if num_requests >= scheduler.settings.max_batch_size:
        return Cause.SEAT
    return Cause.TOKENS
