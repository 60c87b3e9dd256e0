"""Measures the machine at start-up: runs steps on the executor, to which a cost model is fitted.

FastServe profiles the first iteration by prompt length (section 4.1). This profiles prompt pieces
of growing length and decodes of growing batch size and context. It writes to KV blocks before any
request owns them. The most informative steps come first, and a step is skipped if it would
exceed the time limit.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from engine.cost.fit import Sample, fit
from engine.cost.model import CostModel
from engine.pooling import PoolSpec
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId

if TYPE_CHECKING:
    from engine.ports import Clock, StepExecutor, StepFuture
    from engine.step import StepResult

REPEATS = 3
MOST_REPEATS = 15  # of a fast step: its first runs are slower than those of a server under load
_FIRST_ID = 1 << 40  # of requests and steps; an engine's own ids are lower
_SHORT, _LONG = 16, 1024  # tokens of context
_GROWTH = 4  # from one length or batch to the next
_MAX_REPEAT_SHARE = 0.02  # of the time limit, after which a step is not repeated
_MORE_REPEATS_SHARE = 0.005  # of the time limit, after which `REPEATS` are enough


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Limits of a step: those of the scheduler, and the worker's KV blocks."""

    max_batch_size: int
    max_batch_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    pools: bool = False  # whether prompts are pooled; then there are no decodes

    @property
    def longest(self) -> int:
        """The largest number of positions of one request."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Profile(NamedTuple):
    """Measured steps, and the seconds between the answer to a step and the next one's start."""

    samples: list[Sample]
    idle_step: float

    @property
    def model(self) -> CostModel:
        """The cost model fitted to them. ValueError if the fit is not determined."""
        return fit(self.samples, self.idle_step)


class Probe(NamedTuple):
    """A step to measure: `num_requests` entries of `num_tokens` tokens from position `start`."""

    num_requests: int
    num_tokens: int
    start: int

    @property
    def size(self) -> int:
        return self.num_requests * self.num_tokens

    def step(self, number: int, limits: ProbeLimits) -> Step:
        """The step: all requests share the context's blocks, and each writes to its own block."""
        size = limits.block_size
        first_written = self.start // size
        last = (self.start + self.num_tokens - 1) // size
        sample = None if limits.pools else SampleSpec(SamplingParams())
        pooling = PoolSpec() if limits.pools else None
        entries = []
        for index in range(self.num_requests):
            shift = index * (last - first_written + 1)
            own = range(first_written + shift, last + shift + 1)
            blocks = array("i", [*range(first_written), *own]).tobytes()
            request_id, tokens = RequestId(_FIRST_ID + index), (0,) * self.num_tokens
            entry = StepEntry(request_id, self.start, tokens, blocks, sample, pooling=pooling)
            entries.append(entry)
        return Step(StepId(_FIRST_ID + number), tuple(entries))

    def sample(self, seconds: float) -> Sample:
        """The sample for the fit, given the measured seconds."""
        end = self.start + self.num_tokens
        pairs = self.size * (self.start + (self.num_tokens + 1) / 2) if self.num_tokens > 1 else 0.0
        pieces = self.num_requests if self.num_tokens > 1 else 0
        return Sample(self.size, self.num_requests * end, pairs, self.num_requests, seconds, pieces)

    def fits(self, limits: ProbeLimits) -> bool:
        """Whether the step is within the limits."""
        size = limits.block_size
        first_written = self.start // size
        own = (self.start + self.num_tokens - 1) // size - first_written + 1
        return (
            self.num_requests <= limits.max_batch_size
            and self.size <= limits.max_batch_tokens
            and self.start + self.num_tokens <= limits.longest
            and first_written + self.num_requests * own <= limits.num_blocks
        )


def probes(limits: ProbeLimits) -> Iterator[Probe]:
    """The steps to measure, most informative first; each one's context was written earlier."""
    lengths = _growing(limits.max_batch_tokens)
    batches = _growing(limits.max_batch_size)
    if limits.pools:
        lengths = _growing(min(limits.max_batch_tokens, limits.longest))
        wanted = [Probe(1, 1, 0), *(Probe(1, length, 0) for length in lengths)]
        wanted += [Probe(batch, length, 0) for batch in batches for length in (1, _SHORT, 128)]
        return (probe for probe in wanted if probe.fits(limits))
    context = min(_LONG, 2 * lengths[-1], limits.longest - 1)
    piece = max(1, context // 2)
    wanted = [Probe(1, 1, 0)]
    wanted += [Probe(1, length, 0) for length in lengths]
    wanted += [Probe(batch, 1, _SHORT) for batch in batches]
    wanted += [Probe(1, piece, context - piece), Probe(1, 1, context), Probe(8, 1, context)]
    return (probe for probe in wanted if probe.fits(limits))


def _growing(limit: int) -> list[int]:
    """Powers of `_GROWTH` below `limit`, and `limit` itself."""
    powers = takewhile(lambda power: power < limit, (_GROWTH**n for n in count(1)))
    return [*powers, limit]


async def measure(
    executor: "StepExecutor", limits: ProbeLimits, clock: "Clock", seconds: float
) -> Profile:
    """Measure `executor` for about `seconds` at most after the first step, but for at least two
    steps. Raises the error of a failed step."""
    until = clock() + seconds
    samples: list[Sample] = []
    idle: list[float] = []
    per_token = 0.0  # of the previous step; an upper bound for a larger step
    for probe in probes(limits):
        if len(samples) > 1 and probe.size * per_token > until - clock():
            continue
        repeats: list[float] = []
        while _may_repeat(repeats, seconds):
            submitted = clock()
            result = await _result(executor.submit(probe.step(len(idle), limits)))
            idle.append(clock() - submitted - result.seconds)
            repeats.append(result.seconds)
        if not samples:  # the first step brings the weights into memory
            until = clock() + seconds
        samples.append(probe.sample(median(repeats)))
        per_token = samples[-1].seconds / probe.size
    return Profile(samples, max(0.0, median(idle)))


def _may_repeat(repeats: "Sequence[float]", seconds: float) -> bool:
    """Whether a step that took these seconds is run once more, within a limit of `seconds`."""
    share = _MAX_REPEAT_SHARE if len(repeats) < REPEATS else _MORE_REPEATS_SHARE
    return len(repeats) < MOST_REPEATS and sum(repeats) <= share * seconds


async def _result(future: "StepFuture") -> "StepResult":
    done = asyncio.Event()
    future.add_done_callback(lambda _: done.set())
    await done.wait()
    return future.result()
