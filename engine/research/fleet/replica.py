"""Replica: a scheduler in virtual time that its caller advances from event to event.

It does what `Engine` does with one step in flight and a simulated executor, without an event loop:
plan, wait for the step, commit, plan again. An arrival at the moment at which a step returns is
added before the commit, as in `Engine` on the virtual loop.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from engine.control.scheduler import IterationScheduler
from engine.iteration import Iteration
from engine.request import Request, RequestSpec
from engine.simulated.executor import KnownCost, SimulatedExecutor
from engine.simulated.record import Recorder
from engine.simulated.replay import RecordedOutputs, RecordedRequest
from engine.simulated.run import Setup, build_executor, build_scheduler
from engine.simulated.trace import Arrival
from engine.step import StepResult

OnEnd = Callable[[Request], object]


class _StepInFlight(NamedTuple):
    iteration: Iteration
    result: StepResult
    returns_at: float


class Replica:
    """`on_end` is called with each request that has its last token."""

    def __init__(
        self, scheduler: IterationScheduler, executor: SimulatedExecutor, on_end: OnEnd
    ) -> None:
        assert executor.depth == 1, "one step in flight"
        self.scheduler = scheduler
        self.now = 0.0
        self._executor = executor
        self._on_end = on_end
        self._in_flight: _StepInFlight | None = None
        self._may_plan = True  # something has changed since the last plan

    @classmethod
    def build(
        cls, setup: Setup, recorder: Recorder, outputs: RecordedOutputs | None, on_end: OnEnd
    ) -> "Replica":
        """A new replica of the simulated system, which `can_play` its arrivals."""
        scheduler = build_scheduler(setup, KnownCost(setup.cost), recorder)
        recorder.watch(scheduler)
        return cls(scheduler, build_executor(setup, outputs), on_end)

    @property
    def next_at(self) -> float:
        """The time of the next event; infinite if nothing is left to do."""
        if self._in_flight is not None:
            return self._in_flight.returns_at
        return self.now if self._may_plan else inf

    def add(self, spec: RequestSpec, now: float) -> Request:
        """A request arrives; `advance` was called for `now`. Raises as the scheduler's `add`."""
        self.now = max(self.now, now)
        request = self.scheduler.add(spec, now)
        self._may_plan = True
        return request

    def advance(self, until: float) -> None:
        """Process all events before `until`."""
        while self.now < until:
            if self._in_flight is None:
                if not self._may_plan:
                    return
                self._plan()
            elif self._in_flight.returns_at >= until:
                return
            else:
                self._commit(self._in_flight)

    def _plan(self) -> None:
        self._may_plan = False
        iteration = self.scheduler.plan(self.now)
        if iteration is not None:
            result, at = self._executor.run(iteration.step, self.now)
            self._in_flight = _StepInFlight(iteration, result, at)

    def _commit(self, oldest: _StepInFlight) -> None:
        self.now = max(self.now, oldest.returns_at)
        self._in_flight = None
        self._may_plan = True
        deliveries = self.scheduler.commit(oldest.iteration, oldest.result, self.now)
        for request in [request for request, _, _ in deliveries if request.finish is not None]:
            self._on_end(request)


def can_play(setup: Setup, arrivals: Sequence[Arrival]) -> bool:
    """Whether a `Replica` can play these arrivals: one step in flight, and no request that ends
    from outside or is not planned in every iteration."""
    if setup.stages > 1 or setup.lookahead:
        return False
    if setup.num_states or setup.windows != (None,):
        return False
    return all(_is_plain(arrival) for arrival in arrivals)


def _is_plain(arrival: Arrival) -> bool:
    if arrival.patience is not None:
        return False
    params = arrival.params if isinstance(arrival, RecordedRequest) else None
    if params is None:
        return True
    limits = (params.deadline, params.itl_goal, params.grammar)
    return not params.is_background and all(limit is None for limit in limits)
