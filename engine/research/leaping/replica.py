"""Replica: a scheduler in virtual time that its caller advances from event to event.

It does what `Engine` does with one step in flight and a simulated executor, without an event loop:
plan, wait for the step, commit, plan again. Where the next steps are decodes only, it takes them in
one `DecodeLeap`. An arrival at the moment at which a step returns is added before the commit, as
in `Engine` on the virtual loop.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from engine.control.scheduler import IterationScheduler
from engine.iteration import Iteration
from engine.request import Request, RequestSpec, State
from engine.research.leaping.leap import DecodeLeap, Leaps
from engine.simulated.executor import SimulatedExecutor
from engine.step import StepResult

OnEnd = Callable[[Request], object]

WAITING = State.WAITING


class _StepInFlight(NamedTuple):
    iteration: Iteration
    result: StepResult
    returns_at: float


class Replica:
    """`on_end` is called with each request that has its last token."""

    def __init__(
        self,
        scheduler: IterationScheduler,
        executor: SimulatedExecutor,
        leaps: Leaps,
        on_end: OnEnd,
    ) -> None:
        assert executor.depth == 1, "one step in flight"
        self.scheduler = scheduler
        self.now = 0.0
        self._executor = executor
        self._leaps = leaps
        self._on_end = on_end
        self._in_flight: _StepInFlight | DecodeLeap | None = None
        self._is_blocked = False  # the last plan could start no waiting request
        self._may_plan = True  # something has changed since the last plan

    @property
    def next_at(self) -> float:
        """The time of the next event; infinite if nothing is left to do."""
        if self._in_flight is not None:
            return self._in_flight.returns_at
        return self.now if self._may_plan else inf

    def add(self, spec: RequestSpec, now: float) -> Request:
        """A request arrives; `advance` was called for `now`. Raises as the scheduler's `add`."""
        self.now = max(self.now, now)
        if isinstance(self._in_flight, DecodeLeap):
            self._in_flight.stop(now)
        request = self.scheduler.add(spec, now)
        self._may_plan = True
        self._is_blocked = False
        return request

    def advance(self, until: float) -> None:
        """Process all events before `until`."""
        while self.now < until:
            if self._in_flight is None:
                if not self._may_plan:
                    return
                self._plan()
            elif isinstance(self._in_flight, _StepInFlight):
                if self._in_flight.returns_at >= until:
                    return
                self._commit(self._in_flight)
            elif not self._advance_leap(self._in_flight, until):
                return

    def _plan(self) -> None:
        """Begin a leap if possible, else plan one step."""
        self._may_plan = False
        self._in_flight = self._leaps.begin(self.now, is_blocked=self._is_blocked)
        if self._in_flight is not None:
            return
        started = list(self.scheduler.pool.started)
        iteration = self.scheduler.plan(self.now)
        self._is_blocked = started == list(self.scheduler.pool.started)
        if iteration is not None:
            result, at = self._executor.run(iteration.step, self.now)
            self._in_flight = _StepInFlight(iteration, result, at)

    def _commit(self, oldest: _StepInFlight) -> None:
        self.now = max(self.now, oldest.returns_at)
        self._in_flight = None
        self._may_plan = True
        deliveries = self.scheduler.commit(oldest.iteration, oldest.result, self.now)
        ended = [request for request, _, _ in deliveries if request.finish is not None]
        self._is_blocked = self._is_blocked and not ended and self._is_static(oldest.iteration)
        for request in ended:
            self._on_end(request)

    def _is_static(self, iteration: Iteration) -> bool:
        """Whether the next plan would make the same decisions as this iteration's, in which none
        was started: all started requests decoded, and those tried lacked blocks or a seat."""
        scheduler = self.scheduler
        is_decode = len(iteration.requests) == iteration.step.num_tokens
        has_all = len(iteration.requests) == len(scheduler.pool.started)
        return (
            is_decode
            and has_all
            and not iteration.step.moves
            and scheduler.kv.search.hashes_left > 0
        )

    def _advance_leap(self, leap: DecodeLeap, until: float) -> bool:
        """Commit the steps of a leap that return before `until`; returns whether it is over."""
        ended = leap.commit(until)
        self.now = max(self.now, leap.committed_at)
        if leap.is_committed:
            self._in_flight = None
            self._may_plan = True
            self._is_blocked = self._is_blocked and not ended and not leap.is_disturbed
        for request in ended:
            self._on_end(request)
        return leap.is_committed
