"""The real engine on a clock of CPU seconds, for a machine with other load.

The worker computes every step in this process. The virtual clock then advances by the CPU seconds
of the step and of the event loop since the previous step. Other processes do not advance it; they
still share caches and memory bandwidth, so a run can take a third longer than the same run a minute
later. Two runs that are compared take turns, one step each (`Turns`).
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Semaphore
from time import process_time
from typing import TYPE_CHECKING

from engine.errors import Unavailable
from engine.step import StepResult

if TYPE_CHECKING:
    from engine.step import Step
    from engine.worker.process.worker import Worker


def _no_turn() -> None:
    """No other run takes turns with this one."""


class Turns:
    """Runs in threads of their own, of which one at a time has its turn."""

    def __init__(self, count: int) -> None:
        self._turns = [Semaphore(0) for _ in range(count)]
        self._live: list[int] = [*range(count)]
        self._turns[0].release()

    @contextmanager
    def taking(self, number: int) -> "Iterator[Callable[[], None]]":
        """Waits for the first turn of run `number`; gives the function that passes the turn on and
        waits for the next one."""
        self._turns[number].acquire()
        try:
            yield lambda: self._pass_on(number)
        finally:
            following = self._after(number)
            self._live.remove(number)
            self._turns[following].release()

    def _pass_on(self, number: int) -> None:
        self._turns[self._after(number)].release()
        self._turns[number].acquire()

    def _after(self, number: int) -> int:
        return self._live[(self._live.index(number) + 1) % len(self._live)]


class CountedExecutor:
    """A `StepExecutor` with a worker in this process, on a virtual event loop."""

    depth = 1
    is_alive = True

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._answered_at = process_time()  # the loop's own work since then is counted
        self._pass_turn = _no_turn

    def begin(self, pass_turn: Callable[[], None] = _no_turn) -> None:
        """A run begins: what this process did before it is not the loop's work. `pass_turn` is
        called after each step."""
        self._answered_at = process_time()
        self._pass_turn = pass_turn

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Never calls `on_lost`: the worker is this process."""

    def submit(self, step: "Step") -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        submitted = process_time()
        result = self._worker.run(step)
        ended = process_time()
        answer: asyncio.Future[StepResult] = loop.create_future()
        tokens, seconds = result.tokens, ended - submitted
        at = loop.time() + seconds + self._loops_share(submitted)
        loop.call_at(at, self._resolve, answer, StepResult(step.step_id, tokens, seconds))
        self._pass_turn()
        return answer

    def _loops_share(self, submitted: float) -> float:
        return max(0.0, submitted - self._answered_at)

    def _resolve(self, answer: "asyncio.Future[StepResult]", result: StepResult) -> None:
        self._answered_at = process_time()
        if not answer.done():
            answer.set_result(result)

    async def restart(self) -> None:
        raise Unavailable("a worker inside this process cannot be restarted")

    async def close(self) -> None:
        """Nothing to stop."""
