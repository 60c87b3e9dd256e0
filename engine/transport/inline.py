"""Steps run in this process, one per turn of the event loop: for tests and for use as a library.

The loop stands still while a step runs, so this is no way to serve.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.errors import StepFailed, Unavailable, WorkerLost
from engine.step import Step, StepResult

StepAnswer = asyncio.Future[StepResult]


class StepRunner(Protocol):
    """Whatever computes a step; `engine.worker.process.worker.Worker` does."""

    def run(self, step: Step) -> StepResult: ...


class _StepInFlight(NamedTuple):
    step: Step
    answer: StepAnswer


class InlineExecutor:
    """A `StepExecutor` around `worker`, which is lost for good when it raises `WorkerLost`."""

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
        """A worker in this process is lost in a step or not at all, so the step's future tells."""

    def submit(self, step: Step) -> StepAnswer:
        """Run the step in the next turn of the loop, after those submitted before."""
        assert len(self._in_flight) < self._depth, "more steps in flight than depth"
        loop = asyncio.get_running_loop()
        answer: StepAnswer = loop.create_future()
        if self._ended is not None:
            answer.set_exception(WorkerLost(self._ended))
            return answer
        self._in_flight.append(_StepInFlight(step, answer))
        loop.call_soon(self._run_next)
        return answer

    async def restart(self) -> None:
        """Always `Unavailable`: nothing in this process could be started afresh."""
        raise Unavailable("a worker inside this process cannot be restarted")

    async def close(self) -> None:
        """Fail what is in flight and take no more."""
        self._end("the executor was closed")

    def _run_next(self) -> None:
        if not self._in_flight:  # ended meanwhile
            return
        step, answer = self._in_flight[0]
        try:
            result = self._worker.run(step)
        except WorkerLost as error:
            self._end(str(error))
            return
        except Exception as error:  # here is the doorway of a worker without a process
            self._in_flight.popleft()
            failure = StepFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            if not answer.done():
                answer.set_exception(failure)
            return
        self._in_flight.popleft()
        if not answer.done():
            answer.set_result(result)

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        while self._in_flight:
            answer = self._in_flight.popleft().answer
            if not answer.done():
                answer.set_exception(WorkerLost(self._ended))
