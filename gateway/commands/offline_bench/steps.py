"""Builds steps for a worker without a scheduler, and times them.

Before the timing, every block that will be read is written, because reading memory that was never
written is unrealistically fast. One short prompt is computed, copied block by block to the host,
and from there to all requests, with the same moves as swapping.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import NamedTuple

from engine.errors import StepFailed
from engine.step import (
    LAST_TOKEN,
    BlockMove,
    Direction,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
    StepResult,
)
from engine.transport.multiprocess import MultiprocessExecutor
from engine.worker_settings import WorkerReport

GREEDY = SampleSpec(SamplingParams(temperature=0.0))
MIN_STEPS, MAX_STEPS = 3, 2000  # timed steps
FIRST_TOKENS = 128  # tokens of the prompt that is computed and copied


class Timing(NamedTuple):
    """Times of `num_steps` equal steps, in seconds.

    `pace` is the median time from one result to the next, `worker` that of the times that the
    worker reports, and `fastest` the shortest of these. `read` is the shortest plain read of the
    bytes that a step reads, of one before each step; None if none was made.
    """

    pace: float
    worker: float
    num_steps: int
    fastest: float
    read: float | None


@dataclass(slots=True)
class Bench:
    """Assigns a worker's KV blocks and runs steps on it, `in_flight` at a time.

    With `read`, which returns the seconds of a plain read of so many bytes, one is made before each
    timed step, so that step and read find the memory equally fast. Between them an equal step runs,
    during which the timed one is known, as in a server.
    """

    executor: MultiprocessExecutor
    report: WorkerReport
    in_flight: int
    seconds: float  # time for each kind of step
    read: Callable[[int], Awaitable[float]] | None = None
    _random: Random = field(default_factory=lambda: Random(0))
    _num_steps: int = 0

    def blocks_of(self, length: int) -> int:
        return -(-length // self.report.block_size)

    async def fill(self, num_requests: int, context: int, tick: Callable[[], object]) -> None:
        """Write all blocks of `num_requests` requests of `context` tokens; `tick` after each."""
        each = self.blocks_of(context)
        first = min(context, FIRST_TOKENS)
        piece = range(self.blocks_of(first))
        await self._run(self._step([self._prompt(0, first, 0)]))
        for at in range(0, each, len(piece)):
            to = range(at, min(at + len(piece), each))
            await self._move(Direction.OUT, piece[: len(to)], to)
        for request in range(num_requests):
            await self._move(Direction.IN, range(request * each, (request + 1) * each), range(each))
            tick()

    async def decode(self, num_requests: int, context: int, num_bytes: int) -> Timing:
        """Time steps that compute one token, the last of the context, for each request.

        A step reads `num_bytes`.
        """
        each = self.blocks_of(context)

        def steps() -> Iterator[Step]:
            tokens = [self._token() for _ in range(num_requests)]
            while True:
                yield self._step(
                    [
                        StepEntry(
                            RequestId(request),
                            context - 1,
                            (token,),
                            _table(range(request * each, (request + 1) * each)),
                            GREEDY,
                        )
                        for request, token in enumerate(tokens)
                    ]
                )
                if self.in_flight > 1:
                    tokens = [LAST_TOKEN] * num_requests

        return await self._time(steps(), num_bytes)

    async def prefill(self, num_requests: int, length: int, num_bytes: int) -> Timing:
        """Time steps that compute whole prompts and read `num_bytes`."""

        def steps() -> Iterator[Step]:
            while True:
                yield self._step(
                    [self._prompt(request, length, request) for request in range(num_requests)]
                )

        return await self._time(steps(), num_bytes)

    async def _time(self, steps: Iterator[Step], num_bytes: int) -> Timing:
        """Keep steps in flight until the time is over; the first is not counted."""
        waiting: deque[asyncio.Future[StepResult]] = deque()
        ended: list[float] = []
        began: list[float] = []
        worker: list[float] = []
        reads: list[float] = []
        until = 0.0
        while len(ended) <= MIN_STEPS or (time.perf_counter() < until and len(ended) <= MAX_STEPS):
            if self.read is not None:
                reads.append(await self.read(num_bytes))
                before = self.executor.submit(next(steps))
                waiting.append(self.executor.submit(next(steps)))
                _checked(await before)
            began.append(time.perf_counter())
            while len(waiting) < self.in_flight:
                waiting.append(self.executor.submit(next(steps)))
            result = _checked(await waiting.popleft())
            worker.append(result.seconds)
            ended.append(time.perf_counter())
            until = until or ended[0] + self.seconds
        for late in waiting:
            await late
        since = began[1:] if reads else ended  # without the time of reads
        gaps = [later - sooner for sooner, later in zip(since, ended[1:], strict=False)]
        read = min(reads) if reads else None
        return Timing(median(gaps), median(worker[1:]), len(gaps), min(worker[1:]), read)

    async def _move(self, direction: Direction, device: range, host: range) -> None:
        """Copy blocks in one step, whose entry does not use them."""
        move = BlockMove(direction, _table(device), _table(host), is_awaited=True)
        await self._run(self._step([self._prompt(0, 1, 0)], (move,)))

    def _prompt(self, request: int, length: int, place: int) -> StepEntry:
        """A prompt of random tokens, in the blocks of the request number `place`."""
        each = self.blocks_of(length)
        tokens = tuple(self._token() for _ in range(length))
        table = _table(range(place * each, (place + 1) * each))
        return StepEntry(RequestId(request), 0, tokens, table, GREEDY)

    def _step(self, entries: Sequence[StepEntry], moves: tuple[BlockMove, ...] = ()) -> Step:
        self._num_steps += 1
        return Step(StepId(self._num_steps), tuple(entries), moves)

    def _token(self) -> int:
        return self._random.randrange(self.report.vocab_size)

    async def _run(self, step: Step) -> StepResult:
        return _checked(await self.executor.submit(step))


def _table(blocks: Sequence[int]) -> bytes:
    return array("i", blocks).tobytes()


def _checked(result: StepResult) -> StepResult:
    """The result. Raises `StepFailed` if a row failed, for instance with NaN logits."""
    if result.faults:
        raise StepFailed(result.faults[0].message)
    return result
