"""Runs steps in this process, one per callback of the event loop.

The event loop is blocked while a step runs, so a server must not use this executor.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.errors import StepFailed, Unavailable, WorkerLost
from engine.step import Step, StepResult

ResultFuture = asyncio.Future[StepResult]


class StepRunner(Protocol):
    """Computes a step, as `engine.worker.process.worker.Worker` does."""

    def run(self, step: Step) -> StepResult: ...


class _StepInFlight(NamedTuple):
    step: Step
    result: ResultFuture


class InlineExecutor:
    """A `StepExecutor` that calls `worker.run`. After a `WorkerLost` it accepts no more steps."""

    def __init__(self, worker: StepRunner, depth: int = 1) -> None:
        self._worker = worker
        self._depth = depth
        self._in_flight: deque[_StepInFlight] = deque()
        self._ended: str | None = None

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def is_alive(self) -> bool:
        return self._ended is None

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Never calls `on_lost`: this worker is only lost in a step, and its future says so."""

    def submit(self, step: Step) -> ResultFuture:
        """Run the step in a later callback of the loop, after those submitted before."""
        assert len(self._in_flight) < self._depth, "more steps in flight than depth"
        loop = asyncio.get_running_loop()
        future: ResultFuture = loop.create_future()
        if self._ended is not None:
            future.set_exception(WorkerLost(self._ended))
            return future
        self._in_flight.append(_StepInFlight(step, future))
        loop.call_soon(self._run_next)
        return future

    async def restart(self) -> None:
        """Raises `Unavailable`: there is no process to start again."""
        raise Unavailable("a worker inside this process cannot be restarted")

    async def close(self) -> None:
        """Fail the steps in flight and all later ones with `WorkerLost`."""
        self._end("the executor was closed")

    def _run_next(self) -> None:
        if not self._in_flight:  # closed or lost since this callback was scheduled
            return
        step, future = self._in_flight[0]
        try:
            result = self._worker.run(step)
        except WorkerLost as error:
            self._end(str(error))
            return
        except Exception as error:  # as `engine.worker.process.entry` does for a process
            self._in_flight.popleft()
            failure = StepFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            if not future.done():
                future.set_exception(failure)
            return
        self._in_flight.popleft()
        if not future.done():
            future.set_result(result)

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        while self._in_flight:
            future = self._in_flight.popleft().result
            if not future.done():
                future.set_exception(WorkerLost(self._ended))
