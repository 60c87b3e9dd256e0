"""A `StepExecutor` in virtual time over a `Device`: its steps stall and fail, its worker dies."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import StepFailed, Unavailable, WorkerLost
from engine.step import Step, StepResult
from tests.fuzz.engine.wrong import Wrong

if TYPE_CHECKING:
    from engine.cost.model import CostModel
    from tests.fuzz.engine.device import Device


@dataclass(frozen=True, slots=True)
class StepRates:
    """How often a step fails and stalls, and a worker cannot be restarted."""

    failed: float = 0.0
    stalled: float = 0.0
    given_up: float = 0.0


class _InFlight(NamedTuple):
    step: Step
    future: "asyncio.Future[StepResult]"
    ends_at: float
    seconds: float


class FuzzedExecutor:
    """`check` is called with each step and those in flight before it is submitted, `check_lost`
    before a worker is restarted."""

    def __init__(
        self,
        device: "Device",
        cost: "CostModel",
        num_stages: int,
        rates: StepRates,
        random: Random,
        counts: "Counter[str]",
    ) -> None:
        self._device = device
        self._cost = cost
        self._num_stages = num_stages
        self._rates = rates
        self._random = random
        self._counts = counts
        self._in_flight: deque[_InFlight] = deque()
        self._free_at = 0.0  # the first stage
        self._on_lost: Callable[[], object] = lambda: None
        self.check: Callable[[Step, list[Step]], object] = lambda step, in_flight: None
        self.check_lost: Callable[[], object] = lambda: None
        self.is_alive = True

    @property
    def depth(self) -> int:
        return self._num_stages

    def watch(self, on_lost: Callable[[], object]) -> None:
        self._on_lost = on_lost

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        self.check(step, [one.step for one in self._in_flight])
        self._counts["steps"] += 1
        loop = asyncio.get_running_loop()
        is_stalled = self._random.random() < self._rates.stalled
        factor = 30.0 if is_stalled else self._random.choice([1.0, 1.0, 1.0, 0.5, 2.0])
        seconds = self._cost.step(step) * factor
        begins_at = max(self._free_at, loop.time())
        self._free_at = begins_at + seconds / self._num_stages
        last = self._in_flight[-1].ends_at if self._in_flight else 0.0
        flight = _InFlight(step, loop.create_future(), max(begins_at + seconds, last), seconds)
        self._in_flight.append(flight)
        loop.call_at(flight.ends_at, self._finish, flight)
        return flight.future

    def _finish(self, flight: _InFlight) -> None:
        if flight.future.done():  # the worker died
            return
        while True:  # timers of one moment come in any order
            oldest = self._in_flight.popleft()
            self._run(oldest)
            if oldest is flight:
                return

    def _run(self, flight: _InFlight) -> None:
        step, future = flight.step, flight.future
        if step.entries and self._random.random() < self._rates.failed:
            self._counts["failed steps"] += 1
            self._device.fail(step, has_moved=self._random.random() < 0.5)
            future.set_exception(StepFailed("drawn"))
            return
        try:
            result = self._device.run(step)
        except Wrong as error:
            future.set_exception(error)
            return
        drafting = 0.1 * flight.seconds if result.proposals else 0.0
        future.set_result(replace(result, seconds=flight.seconds, proposal_seconds=drafting))

    def kill(self) -> None:
        """The worker dies; steps in flight may have made some of their moves."""
        if not self.is_alive:
            return
        self._counts["kills"] += 1
        self.is_alive = False
        if self._in_flight and self._random.random() < 0.5:
            self._device.fail(self._in_flight[0].step, has_moved=True)
        self._device.lose()
        while self._in_flight:
            future = self._in_flight.popleft().future
            future.set_exception(WorkerLost("killed"))
            future.exception()  # the engine looks at the oldest only
        self._on_lost()

    async def restart(self) -> None:
        self.check_lost()
        await asyncio.sleep(self._random.choice([0.0, 0.5, 3.0]))
        if self._random.random() < self._rates.given_up:
            self._counts["given up"] += 1
            raise Unavailable("drawn")
        self._device.lose()
        self.is_alive = True
        self._free_at = 0.0
