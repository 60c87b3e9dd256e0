"""Engines in one process that run by turns of a few milliseconds, and the time of each.

An engine's turn ends when it submits a step after its time is up: the step then waits for the
engine's next turn. Meanwhile nothing of that engine has anything to do, so the whole time belongs
to the engine whose turn it is. The order of turns is random, because what a turn leaves in the
caches of the CPU changes the speed of the next one.
"""

import asyncio
from random import Random

from engine.ports import Clock
from engine.step import Step
from tests.inline_executor import InlineExecutor, ResultFuture, StepRunner

SECONDS = 0.005  # of a turn


class TimeSlices:
    """Whose turn it is, and the seconds of each engine, named by its executor."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock = clock
        self._random = random
        self._began = 0.0  # the present turn
        self._seconds: dict[SlicedExecutor, float] = {}  # of all their turns that have ended
        self._order: list[SlicedExecutor] = []  # the first one has its turn

    async def begin(self, executor: "SlicedExecutor") -> None:
        """Wait for the engine's first turn, to begin to serve."""
        self._order.append(executor)
        if self._order[0] is executor:
            self._began = self._clock()
        else:
            await executor.first_turn()

    def now(self, executor: "SlicedExecutor") -> float:
        """The engine's own clock, which runs during its turns."""
        seconds = self._seconds.get(executor, 0.0)
        if self._order and self._order[0] is executor:
            seconds += self._clock() - self._began
        return seconds

    def end(self, executor: "SlicedExecutor") -> None:
        """The engine has served everything."""
        if self._order[0] is executor:
            self._count()
        self._order.remove(executor)
        if self._order:
            self._order[0].resume()

    def may_submit(self, executor: "SlicedExecutor") -> bool:
        """Whether it is the engine's turn. If its time is up, another engine's turn begins."""
        if self._order[0] is not executor:
            return False
        if len(self._order) == 1 or self._clock() - self._began < SECONDS:
            return True
        self._count()
        others = self._order[1:]
        self._random.shuffle(others)
        self._order = [*others, executor]
        self._order[0].resume()
        return False

    def _count(self) -> None:
        now = self._clock()
        first = self._order[0]
        self._seconds[first] = self._seconds.get(first, 0.0) + now - self._began
        self._began = now


class SlicedExecutor(InlineExecutor):
    """Runs steps in this process while it is the engine's turn."""

    def __init__(self, worker: StepRunner, slices: TimeSlices) -> None:
        super().__init__(worker)
        self._slices = slices
        self._held: tuple[Step, ResultFuture] | None = None
        self._first_turn: asyncio.Future[None] | None = None

    def submit(self, step: Step) -> ResultFuture:
        """Run the step in a later callback of the loop, in this turn or the next one."""
        if self._slices.may_submit(self):
            return super().submit(step)
        future: ResultFuture = asyncio.get_running_loop().create_future()
        self._held = (step, future)
        return future

    def now(self) -> float:
        """The engine's own clock."""
        return self._slices.now(self)

    async def first_turn(self) -> None:
        """Wait until `resume` is called."""
        self._first_turn = asyncio.get_running_loop().create_future()
        await self._first_turn

    def resume(self) -> None:
        """Run the step that was held, if any; the engine's turn begins."""
        if self._first_turn is not None:
            self._first_turn.set_result(None)
            self._first_turn = None
        if self._held is not None:
            (step, held), self._held = self._held, None
            super().submit(step).add_done_callback(lambda done: _copy(done, held))


def _copy(done: ResultFuture, held: ResultFuture) -> None:
    error = done.exception()
    if error is not None:
        held.set_exception(error)
    else:
        held.set_result(done.result())
