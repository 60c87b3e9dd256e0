"""SimulatedExecutor: returns the result of each step after the seconds a cost model predicts."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.cost.live import WEIGHT, LiveCost
from engine.errors import Unavailable
from engine.step import (
    LAST_TOKEN,
    BlockMove,
    Direction,
    PageKind,
    RequestId,
    Step,
    StepEntry,
    StepResult,
)

VECTOR = bytes(4)  # a pooling request's result: one number, 0


def synthetic_token(entry: StepEntry) -> int:
    """The next token of an entry, a function of its request id and position only."""
    return (31 * entry.request_id + 7 * (entry.start + len(entry.tokens))) % 1009


class StepCost(Protocol):
    """The seconds of a step, and of the event loop around one (`CostModel`)."""

    def step(self, step: Step) -> float: ...

    def idle(self, num_entries: int) -> float: ...


class _Sampled(NamedTuple):
    at: float
    requests: set[RequestId]


class SimulatedExecutor:
    """`depth` pipeline stages, each of which takes an equal share of a step's cost.

    A step enters the pipeline when the first stage is free and leaves it after the last stage, so
    with `depth` steps in flight one result arrives every `cost / depth` seconds. Each stage has a
    full-duplex link to the host, which transfers its share of a block in `block_seconds`, and
    snapshots of recurrent states at once. A stage makes the awaited moves before it computes,
    without waiting for the previous stage, and the other moves while it computes; it is free when
    all of them have ended.

    The result arrives after the step plus the event loop's time (`CostModel.idle`). `next_token`
    gives the tokens; None makes every token 0, which is faster. Up to `lookahead` more steps may
    be in flight; a step that continues from tokens of an earlier step waits for those tokens.
    """

    def __init__(
        self,
        cost: StepCost,
        depth: int = 1,
        next_token: Callable[[StepEntry], int] | None = synthetic_token,
        lookahead: int = 0,
        block_seconds: float = 0.0,
    ) -> None:
        self._cost = cost
        self._block_seconds = block_seconds
        self._depth = depth
        self._next_token = next_token
        self._lookahead = lookahead
        self._free_at = [0.0] * depth  # one per stage
        self._sampled: deque[_Sampled] = deque(maxlen=depth)  # with lookahead

    @property
    def depth(self) -> int:
        return self._depth + self._lookahead

    @property
    def is_alive(self) -> bool:
        """Always true: a simulated worker does not die."""
        return True

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Never calls `on_lost`."""

    def submit(self, step: Step) -> asyncio.Future[StepResult]:
        loop = asyncio.get_running_loop()
        result, at = self.run(step, loop.time())
        future: asyncio.Future[StepResult] = loop.create_future()
        loop.call_at(at, _resolve, future, result)
        return future

    def run(self, step: Step, now: float) -> tuple[StepResult, float]:
        """The result of a step that is submitted at `now`, and when it returns."""
        seconds = self._cost.step(step)
        before, beside = self._link_seconds(step)
        at = max(now, self._tokens_known_at(step)) if self._lookahead else now
        for stage in range(self._depth):
            begins = max(now, self._free_at[stage])
            at = max(at, begins + before) + seconds / self._depth
            at = self._free_at[stage] = max(at, begins + beside)
        if self._lookahead:
            self._sampled.append(_Sampled(at, {entry.request_id for entry in step.entries}))
        at += self._cost.idle(len(step.entries))
        tokens, num_accepted = self._sample(step)
        vectors = (VECTOR,) * sum([entry.pooling is not None for entry in step.entries])
        result = StepResult(
            step.step_id, tokens, before + seconds, num_accepted=num_accepted, vectors=vectors
        )
        return result, at

    def _sample(self, step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of a step, and the number of accepted drafts of each entry with drafts."""
        next_token = self._next_token
        sampled = [entry for entry in step.entries if entry.sample is not None]
        if next_token is None:
            return (0,) * len(sampled), (0,) * sum([entry.num_drafts > 0 for entry in sampled])
        if not step.has_drafts:
            return tuple([next_token(entry) for entry in sampled]), ()
        tokens: list[int] = []
        num_accepted: list[int] = []
        for entry in sampled:
            rows = _sample_rows(entry, next_token)
            tokens += rows
            if entry.num_drafts:
                num_accepted.append(len(rows) - 1)
        return tuple(tokens), tuple(num_accepted)

    def _tokens_known_at(self, step: Step) -> float:
        """The moment at which all tokens of earlier steps are known that this step reads."""
        held = {entry.request_id for entry in step.entries if entry.tokens == (LAST_TOKEN,)}
        return max((at for at, requests in self._sampled if requests & held), default=0.0)

    def _link_seconds(self, step: Step) -> tuple[float, float]:
        """Seconds of a stage's awaited moves, and of all of its moves."""
        if not step.moves:
            return 0.0, 0.0
        return (
            self._seconds_of([move for move in step.moves if move.is_awaited]),
            self._seconds_of(step.moves),
        )

    def _seconds_of(self, moves: Sequence[BlockMove]) -> float:
        blocks = _link_blocks([move for move in moves if move.kind is PageKind.BLOCK])
        return self._block_seconds * blocks

    async def restart(self) -> None:
        raise Unavailable("a simulated worker does not die")


def _sample_rows(entry: StepEntry, next_token: Callable[[StepEntry], int]) -> list[int]:
    """The tokens of an entry: one, and one more for each accepted draft."""
    num_known = len(entry.tokens) - entry.num_drafts
    sampled: list[int] = []
    for count, draft in enumerate((*entry.tokens[num_known:], None)):
        row = entry._replace(tokens=entry.tokens[: num_known + count], num_drafts=0)
        sampled.append(next_token(row))
        if sampled[-1] != draft:
            break
    return sampled


def _link_blocks(moves: Sequence[BlockMove]) -> int:
    """Blocks that cross the link in its busier direction."""
    out = sum(move.num_blocks for move in moves if move.direction is Direction.OUT)
    return max(out, sum(move.num_blocks for move in moves) - out)


def _resolve(future: asyncio.Future[StepResult], result: StepResult) -> None:
    if not future.done():
        future.set_result(result)


class KnownCost(LiveCost):
    """Only the rate of tokens is updated. (Updating the model would be a costly no-op at half a
    million steps per run.)"""

    def observe(self, step: Step, seconds: float) -> None:
        self.observe_tokens(step.num_tokens, seconds)

    def observe_tokens(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took `seconds`."""
        if seconds > 0.0:
            latest = num_tokens / seconds
            self.tokens_per_second += WEIGHT * (latest - self.tokens_per_second)
