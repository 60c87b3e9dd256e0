"""SimulatedExecutor: answers each step after the seconds that the cost model says."""

import asyncio
from typing import TYPE_CHECKING

from engine.errors import Unavailable
from engine.step import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.cost import CostModel
    from engine.step import Step, StepEntry


def letters(entry: "StepEntry") -> int:
    """The token after an entry: a number that depends on its request and position only."""
    return (31 * entry.request_id + 7 * (entry.start + len(entry.tokens))) % 1009


class SimulatedExecutor:
    """`depth` pipeline stages that take equal shares of a step's cost.

    A step enters the pipeline when the first stage is free and leaves when every stage has
    worked on it, so with `depth` steps in flight one comes back each `cost / depth` seconds.
    The answer comes after what the loop takes in between (`CostModel.idle`). Without `draw`
    every token is 0: fine where nobody looks at them, and faster.
    """

    def __init__(
        self,
        cost: "CostModel",
        depth: int = 1,
        draw: "Callable[[StepEntry], int] | None" = letters,
    ) -> None:
        self._cost = cost
        self._depth = depth
        self._draw = draw
        self._free_at = [0.0] * depth  # one per stage

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def is_alive(self) -> bool:
        """Always: a simulated worker does not die."""
        return True

    def watch(self, on_lost: "Callable[[], object]") -> None:
        """There will be nothing to tell."""

    def submit(self, step: "Step") -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        seconds = self._cost.step(step)
        at = loop.time()
        for stage in range(self._depth):
            at = max(at, self._free_at[stage]) + seconds / self._depth
            self._free_at[stage] = at
        at += self._cost.idle(len(step.entries))
        draw = self._draw
        if draw is None:
            tokens = tuple([0 for entry in step.entries if entry.draw is not None])
        else:
            tokens = tuple([draw(entry) for entry in step.entries if entry.draw is not None])
        future: asyncio.Future[StepResult] = loop.create_future()
        loop.call_at(at, _resolve, future, StepResult(step.step_id, tokens, seconds))
        return future

    async def restart(self) -> None:
        raise Unavailable("a simulated worker does not die")


def _resolve(future: "asyncio.Future[StepResult]", result: StepResult) -> None:
    if not future.done():
        future.set_result(result)
