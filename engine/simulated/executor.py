"""SimulatedExecutor: answers each step after the seconds that the cost model says."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import Unavailable
from engine.step import LAST_TOKEN, Direction, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.cost.model import CostModel
    from engine.step import BlockMove, RequestId, Step, StepEntry


def letters(entry: "StepEntry") -> int:
    """The token after an entry: a number that depends on its request and position only."""
    return (31 * entry.request_id + 7 * (entry.start + len(entry.tokens))) % 1009


class _Sampled(NamedTuple):
    at: float
    requests: "set[RequestId]"


class SimulatedExecutor:
    """`depth` pipeline stages that take equal shares of a step's cost.

    A step enters the pipeline when the first stage is free and leaves when every stage has
    worked on it, so with `depth` steps in flight one comes back each `cost / depth` seconds.
    Each stage has a link to the host that takes `block_seconds` for its share of a block, in both
    directions at once. It makes awaited moves before it computes, not waiting for the stage
    before, and the others beside; it is free when all have ended.
    The answer comes after what the loop takes in between (`CostModel.idle`). Without `draw`
    every token is 0: fine where nobody looks at them, and faster. `lookahead` more steps may be in
    flight; one that goes on from tokens of a step before waits for them.
    """

    def __init__(
        self,
        cost: "CostModel",
        depth: int = 1,
        draw: "Callable[[StepEntry], int] | None" = letters,
        lookahead: int = 0,
        block_seconds: float = 0.0,
    ) -> None:
        self._cost = cost
        self._block_seconds = block_seconds
        self._depth = depth
        self._draw = draw
        self._lookahead = lookahead
        self._free_at = [0.0] * depth  # one per stage
        self._sampled: deque[_Sampled] = deque(maxlen=depth)  # with lookahead

    @property
    def depth(self) -> int:
        return self._depth + self._lookahead

    @property
    def is_alive(self) -> bool:
        """Always: a simulated worker does not die."""
        return True

    def watch(self, on_lost: "Callable[[], object]") -> None:
        """There will be nothing to tell."""

    def submit(self, step: "Step") -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        seconds = self._cost.step(step)
        before, beside = self._link_seconds(step)
        now = loop.time()
        at = max(now, self._held_until(step)) if self._lookahead else now
        for stage in range(self._depth):
            begins = max(now, self._free_at[stage])
            at = max(at, begins + before) + seconds / self._depth
            at = self._free_at[stage] = max(at, begins + beside)
        if self._lookahead:
            self._sampled.append(_Sampled(at, {entry.request_id for entry in step.entries}))
        at += self._cost.idle(len(step.entries))
        draw = self._draw
        if draw is None:
            tokens = tuple([0 for entry in step.entries if entry.sample is not None])
        else:
            tokens = tuple([draw(entry) for entry in step.entries if entry.sample is not None])
        future: asyncio.Future[StepResult] = loop.create_future()
        loop.call_at(at, _resolve, future, StepResult(step.step_id, tokens, before + seconds))
        return future

    def _held_until(self, step: "Step") -> float:
        """When the last of the tokens is known that the step goes on from."""
        held = {entry.request_id for entry in step.entries if entry.tokens == (LAST_TOKEN,)}
        return max((at for at, requests in self._sampled if requests & held), default=0.0)

    def _link_seconds(self, step: "Step") -> tuple[float, float]:
        """Seconds of a stage's awaited moves, and of all its moves."""
        if not step.moves:
            return 0.0, 0.0
        awaited = [move for move in step.moves if move.is_awaited]
        return (
            self._block_seconds * _link_blocks(awaited),
            self._block_seconds * _link_blocks(step.moves),
        )

    async def restart(self) -> None:
        raise Unavailable("a simulated worker does not die")


def _link_blocks(moves: "Sequence[BlockMove]") -> int:
    """Blocks that the busier direction of the link carries."""
    out = sum(move.num_blocks for move in moves if move.direction is Direction.OUT)
    return max(out, sum(move.num_blocks for move in moves) - out)


def _resolve(future: "asyncio.Future[StepResult]", result: StepResult) -> None:
    if not future.done():
        future.set_result(result)
