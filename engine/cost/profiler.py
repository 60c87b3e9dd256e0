"""Measures the machine before anybody waits: steps through the executor, then a fitted cost model.

FastServe profiles the first iteration by prompt length (section 4.1). Here: pieces of prompts of
growing length, decodes in growing batches and contexts. KV is written where nobody owns it yet.
The steps that tell most come first, and none begins that would not end within the time.
"""

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from engine.cost.fit import Sample, fit
from engine.cost.model import CostModel
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId

if TYPE_CHECKING:
    from engine.ports import Clock, StepExecutor, StepFuture
    from engine.step import StepResult

REPEATS = 3
_FIRST_ID = 1 << 40  # of requests and steps that no engine knows
_SHORT, _LONG = 16, 1024  # tokens of context
_GROWTH = 4  # from one length or batch to the next
_BRIEF = 0.02  # of the time: once a step has had so much, it is not repeated


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a step may be like: the scheduler's bounds and the worker's blocks."""

    max_batch_size: int
    max_batch_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int

    @property
    def longest(self) -> int:
        """Positions that one request of the profile may have."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Probe(NamedTuple):
    """A step to measure: so many requests alike, each of `num_tokens` tokens from `start` on."""

    num_requests: int
    num_tokens: int
    start: int

    @property
    def size(self) -> int:
        return self.num_requests * self.num_tokens

    def step(self, number: int, bounds: Bounds) -> Step:
        """All requests read the same blocks, and each writes to a last one of its own."""
        size = bounds.block_size
        first_written = self.start // size
        last = (self.start + self.num_tokens - 1) // size
        entries = []
        for index in range(self.num_requests):
            shift = index * (last - first_written + 1)
            own = range(first_written + shift, last + shift + 1)
            blocks = array("i", [*range(first_written), *own]).tobytes()
            request_id, tokens = RequestId(_FIRST_ID + index), (0,) * self.num_tokens
            entries.append(
                StepEntry(request_id, self.start, tokens, blocks, SampleSpec(SamplingParams()))
            )
        return Step(StepId(_FIRST_ID + number), tuple(entries))

    def sample(self, seconds: float) -> Sample:
        """It took so long."""
        end = self.start + self.num_tokens
        pairs = self.size * (self.start + (self.num_tokens + 1) / 2) if self.num_tokens > 1 else 0.0
        return Sample(self.size, self.num_requests * end, pairs, self.num_requests, seconds)

    def fits(self, bounds: Bounds) -> bool:
        """Whether a scheduler could plan it."""
        size = bounds.block_size
        first_written = self.start // size
        own = (self.start + self.num_tokens - 1) // size - first_written + 1
        return (
            self.num_requests <= bounds.max_batch_size
            and self.size <= bounds.max_batch_tokens
            and self.start + self.num_tokens <= bounds.longest
            and first_written + self.num_requests * own <= bounds.num_blocks
        )


def probes(bounds: Bounds) -> Iterator[Probe]:
    """What to measure, the most telling first; each context was written by those before."""
    lengths = _growing(bounds.max_batch_tokens)
    batches = _growing(bounds.max_batch_size)
    context = min(_LONG, 2 * lengths[-1], bounds.longest - 1)
    piece = max(1, context // 2)
    wanted = [Probe(1, 1, 0)]
    wanted += [Probe(1, length, 0) for length in lengths]
    wanted += [Probe(batch, 1, _SHORT) for batch in batches]
    wanted += [Probe(1, piece, context - piece), Probe(1, 1, context), Probe(8, 1, context)]
    return (probe for probe in wanted if probe.fits(bounds))


def _growing(limit: int) -> list[int]:
    """Powers of `_GROWTH` below `limit`, and `limit` itself."""
    powers = takewhile(lambda power: power < limit, (_GROWTH**n for n in count(1)))
    return [*powers, limit]


async def measure(
    executor: "StepExecutor", bounds: Bounds, clock: "Clock", seconds: float
) -> CostModel:
    """A cost model of what `executor` runs, after about `seconds` at most (but two steps at
    least). Raises what a failed step raises, and ValueError where nothing can be told apart."""
    until = clock() + seconds
    samples: list[Sample] = []
    idle: list[float] = []
    per_token = 0.0  # of the step before: a larger one takes no longer for each
    for probe in probes(bounds):
        if len(samples) > 1 and probe.size * per_token > until - clock():
            continue
        repeats: list[float] = []
        while len(repeats) < REPEATS and sum(repeats) <= _BRIEF * seconds:
            submitted = clock()
            result = await _answered(executor.submit(probe.step(len(idle), bounds)))
            idle.append(clock() - submitted - result.seconds)
            repeats.append(result.seconds)
        samples.append(probe.sample(median(repeats)))
        per_token = samples[-1].seconds / probe.size
    return fit(samples, idle_step=max(0.0, median(idle)))


async def _answered(future: "StepFuture") -> "StepResult":
    done = asyncio.Event()
    future.add_done_callback(lambda _: done.set())
    await done.wait()
    return future.result()
