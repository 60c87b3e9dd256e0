"""InFlight: the iterations that the workers have, the oldest first."""

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.control.scheduler import IterationScheduler
    from engine.iteration import Iteration
    from engine.ports import StepExecutor, StepFuture


class Flight(NamedTuple):
    """An iteration, and its result when it has returned."""

    iteration: "Iteration"
    future: "StepFuture"


class InFlight:
    """Holds at most `depth` iterations, of which `lookahead` are planned before the tokens of the
    one before are known. `on_change` is called when one returns or a worker is lost."""

    def __init__(
        self,
        executor: "StepExecutor",
        depth: int,
        lookahead: int,
        on_change: "Callable[[], object]",
    ) -> None:
        self._executor = executor
        self._depth = depth
        self._lookahead = lookahead
        self._on_change = on_change
        self._flights: deque[Flight] = deque()
        executor.watch(on_change)

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether another iteration may be submitted."""
        return len(self._flights) < self._depth and self._executor.is_alive

    @property
    def has_died_idle(self) -> bool:
        """Whether a worker was lost while no step was in flight, whose future would report it."""
        return not self._flights and not self._executor.is_alive

    @property
    def has_returned(self) -> bool:
        """Whether the oldest iteration has returned."""
        return bool(self._flights) and self._flights[0].future.done()

    def plan(self, scheduler: "IterationScheduler", now: float) -> "Iteration | None":
        """The next iteration: of requests in no iteration, else planned ahead of the oldest."""
        if not self._lookahead or not self._flights:
            return scheduler.plan(now)
        oldest = self._flights[0].iteration
        if len(self._flights) >= self._depth - self._lookahead:
            return scheduler.plan(now, oldest)
        return scheduler.plan(now) or scheduler.plan(now, oldest)

    def submit(self, iteration: "Iteration") -> None:
        """Send an iteration to the workers."""
        future = self._executor.submit(iteration.step)
        future.add_done_callback(self._returned)
        self._flights.append(Flight(iteration, future))

    def pop(self) -> Flight:
        """Take the oldest iteration out."""
        return self._flights.popleft()

    def put_back(self, flight: Flight) -> None:
        """The oldest iteration was lost with all others."""
        self._flights.appendleft(flight)

    def lose(self) -> "list[Iteration]":
        """No iteration will return."""
        lost = [flight.iteration for flight in self._flights]
        self._flights.clear()
        return lost

    def _returned(self, future: "StepFuture") -> None:
        self._on_change()
