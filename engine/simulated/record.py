"""Recorder: an observer that collects inter-token latencies and the state over time."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from engine.control.scheduler import IterationScheduler
from engine.iteration import Iteration, Observer
from engine.request import Request, State
from engine.step import BlockMove, Direction, RequestId


class Moment(NamedTuple):
    """The state at one time; `preempted` counts since the start of the run."""

    at: float
    waiting: int  # requests without KV
    admitted: int  # requests with KV
    held_slots: int
    preempted: int  # preemptions, by recomputation or by swapping out
    host_slots: int = 0  # slots used in host memory, moves in progress included


class Recorder(Observer):
    """Samples the state at the first commit of every `period` seconds. Call `watch` before the
    first request."""

    def __init__(self, period: float) -> None:
        self.gaps = array("d")  # inter-token latencies in seconds, of all requests
        self.moments: list[Moment] = []
        self.num_recomputed = 0  # preemptions whose KV is recomputed
        self.num_swapped = 0  # preemptions whose KV is swapped out
        self.num_ahead = 0  # those swapped out before the space was needed
        self.swapped_blocks = 0  # blocks moved, in both directions
        self.block_size = 1
        self.num_iterations = 0
        self.busy_seconds = 0.0
        self._period = period
        self.next_sample = 0.0  # when the state is sampled next
        self._scheduler: IterationScheduler | None = None
        self._last_token_at: dict[RequestId, float] = {}

    def watch(self, scheduler: IterationScheduler) -> None:
        self._scheduler = scheduler
        self.block_size = scheduler.kv.block_size

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        self.num_iterations += 1
        self.busy_seconds += seconds
        last = self._last_token_at
        for request in iteration.requests:
            if request.times.last_token_at == now:
                before = last.get(request.request_id)
                last[request.request_id] = now
                if before is not None:
                    self.add_gap(now - before, 1)
        self.sample_if_due(now)

    def add_gap(self, seconds: float, count: int) -> None:
        """So many requests got a token `seconds` after their last one."""
        if count == 1:
            self.gaps.append(seconds)
        else:
            self.gaps.extend(array("d", (seconds,)) * count)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._last_token_at.pop(request.request_id, None)

    def produced(self, requests: Iterable[Request], now: float) -> None:
        """Each of these requests got a token."""
        for request in requests:
            self._last_token_at[request.request_id] = now

    def sample_if_due(self, now: float) -> None:
        """An iteration was committed: sample the state if the period is over."""
        if now >= self.next_sample:
            self.next_sample = now + self._period
            self._sample(now)

    def preempted(self, request: Request, now: float) -> None:
        self.num_recomputed += 1

    def swapped(self, request: Request, move: BlockMove, now: float) -> None:
        self.swapped_blocks += move.num_blocks
        if move.direction is Direction.OUT:
            self.num_swapped += 1
            self.num_ahead += not move.is_awaited

    def _sample(self, now: float) -> None:
        assert self._scheduler is not None, "watch is called before the first request"
        pool, counts, size = self._scheduler.pool, self._scheduler.kv_counts, self.block_size
        held = counts.device.held * size
        waiting = pool.count(State.WAITING)
        preempted = self.num_recomputed + self.num_swapped
        host = (counts.host.held + counts.host.moving) * size
        self.moments.append(Moment(now, waiting, pool.num_admitted, held, preempted, host))
