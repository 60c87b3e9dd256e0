"""Recorder: the observer of a simulation. Gaps between tokens, and the state over time."""

from array import array
from typing import TYPE_CHECKING, NamedTuple

from engine.events import Silence
from engine.request import State

if TYPE_CHECKING:
    from engine.iteration import Iteration
    from engine.request import Request
    from engine.scheduler import IterationScheduler
    from engine.step import RequestId


class Moment(NamedTuple):
    """The state at one time; `preempted` counts from the start."""

    at: float
    waiting: int  # requests without KV
    admitted: int  # requests with KV
    held_slots: int
    preempted: int


class Recorder(Silence):
    """Samples at the first commit of each `period` seconds; `watch` before the first request."""

    def __init__(self, period: float) -> None:
        self.gaps = array("d")  # seconds between two tokens of one request (ITL), all requests
        self.moments: list[Moment] = []
        self.num_preempted = 0
        self.num_iterations = 0
        self.busy_seconds = 0.0
        self._period = period
        self._next_sample = 0.0
        self._scheduler: IterationScheduler | None = None
        self._last_token_at: dict[RequestId, float] = {}

    def watch(self, scheduler: "IterationScheduler") -> None:
        self._scheduler = scheduler

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        self.num_iterations += 1
        self.busy_seconds += seconds
        last = self._last_token_at
        for request in iteration.requests:
            if request.last_token_at == now:
                before = last.get(request.request_id)
                last[request.request_id] = now
                if before is not None:
                    self.gaps.append(now - before)
        if now >= self._next_sample:
            self._next_sample = now + self._period
            self._sample(now)

    def preempted(self, request: "Request", now: float) -> None:
        self.num_preempted += 1

    def _sample(self, now: float) -> None:
        assert self._scheduler is not None, "a recorder watches from the start"
        pool, ledger = self._scheduler.pool, self._scheduler.ledger
        held = ledger.num_held * ledger.block_size
        waiting = pool.count(State.WAITING)
        self.moments.append(Moment(now, waiting, pool.num_admitted, held, self.num_preempted))
