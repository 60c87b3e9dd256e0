"""The real engine on a clock of CPU seconds, for a machine with other load.

The worker computes every step in this process. The virtual clock then advances by the CPU seconds
of the step and of the event loop since the previous step. Other processes do not advance it; they
still share caches and memory bandwidth.
"""

import asyncio
from collections.abc import Callable
from time import process_time
from typing import TYPE_CHECKING

from engine.errors import Unavailable
from engine.step import StepResult

if TYPE_CHECKING:
    from engine.step import Step
    from engine.worker.process.worker import Worker


class CountedExecutor:
    """A `StepExecutor` with a worker in this process, on a virtual event loop."""

    depth = 1
    is_alive = True

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._answered_at = process_time()  # the loop's own work since then is counted

    def begin(self) -> None:
        """A run begins: what this process did before it is not the loop's work."""
        self._answered_at = process_time()

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
