"""Measures the machine at start-up: runs steps on the executor, to which a cost model is fitted.

FastServe profiles the first iteration by prompt length (section 4.1). This profiles prompt pieces
of growing length and decodes of growing batch size and context. It writes to KV blocks before any
request owns them. The most informative steps come first, and a step is skipped if it would
exceed the time limit.

All steps are measured in rounds, so that other work on the machine for a second does not hit all
runs of one step, and the fastest round of a step counts. Two rounds that take the same time end the
profile; if no two do, it is not stable.
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from statistics import median
from typing import NamedTuple

from engine.cost.fit import Sample, fit
from engine.cost.model import CostModel
from engine.pooling import PoolSpec
from engine.ports import Clock, StepExecutor, StepFuture
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId, StepResult

_FIRST_ID = 1 << 40  # fixed: of requests and steps; an engine's own ids are lower
# Swept in results/constants
MAX_REPEATS = 5  # runs of a step in a round: its first ones are slower than those of a busy server
REPEAT_SHARE = 0.005  # share of the time limit, after which a step is not repeated in a round
MAX_ROUNDS = 3
SAME = 0.1  # relative difference of the seconds of two rounds
GROWTH = 4  # from one length or batch to the next
SHORT = 16  # tokens of context


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Limits of a step: those of the scheduler, and the worker's KV blocks."""

    max_batch_size: int
    max_batch_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    pools: bool = False  # whether prompts are pooled; then there are no decodes
    graphs: tuple[int, ...] = ()  # see `CostModel`

    @property
    def longest(self) -> int:
        """The largest number of positions of one request."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Awaited(Exception):
    """A request waits for the machine that is being measured."""


def nobody_waits() -> bool:
    """Measure to the end."""
    return False


class Profile(NamedTuple):
    """Measured steps, and the seconds between the answer to a step and the next one's start.

    It is not stable if the steps took another time in each round.
    """

    samples: list[Sample]
    idle_step: float
    is_stable: bool = True
    graphs: tuple[int, ...] = ()  # see `CostModel`

    @property
    def model(self) -> CostModel:
        """The cost model fitted to them. ValueError if the fit is not determined."""
        return fit(self.samples, self.idle_step, graphs=self.graphs)


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
        wanted += [Probe(batch, length, 0) for batch in batches for length in (1, SHORT, 128)]
        return (probe for probe in wanted if probe.fits(limits))
    context = min(2 * lengths[-1], limits.longest - 1)
    piece = max(1, context // 2)
    wanted = [Probe(1, 1, 0)]
    wanted += [Probe(1, length, 0) for length in lengths]
    wanted += [Probe(batch, 1, SHORT) for batch in batches]
    wanted += [Probe(1, piece, context - piece), Probe(1, 1, context), Probe(8, 1, context)]
    return (probe for probe in wanted if probe.fits(limits))


def _growing(limit: int) -> list[int]:
    """Powers of `GROWTH` below `limit`, and `limit` itself."""
    powers = takewhile(lambda power: power < limit, (GROWTH**n for n in count(1)))
    return [*powers, limit]


async def measure(
    executor: StepExecutor,
    limits: ProbeLimits,
    clock: Clock,
    seconds: float,
    is_awaited: Callable[[], bool] = nobody_waits,
) -> Profile:
    """Measure `executor` for about `seconds` at most after the first step, but for at least two
    steps. Raises the error of a failed step, and `Awaited` between two steps."""
    profiler = _Profiler(executor, limits, clock, seconds, is_awaited)
    fastest = await profiler.round()
    is_stable = True
    for _ in range(1, MAX_ROUNDS):
        if profiler.until - clock() < sum(fastest.values()):
            break
        again = await profiler.round()
        before, now = (sum(times[probe] for probe in again) for times in (fastest, again))
        fastest |= {probe: min(took, fastest[probe]) for probe, took in again.items()}
        is_stable = abs(now - before) <= SAME * before
        if is_stable:
            break
    samples = [probe.sample(took) for probe, took in fastest.items()]
    return Profile(samples, max(0.0, median(profiler.idle)), is_stable, limits.graphs)


class _Profiler:
    """Runs probes on an executor; a limit of `seconds` begins after the first step."""

    def __init__(
        self,
        executor: StepExecutor,
        limits: ProbeLimits,
        clock: Clock,
        seconds: float,
        is_awaited: Callable[[], bool],
    ) -> None:
        self.until = clock() + seconds
        self._is_awaited = is_awaited
        self.idle: list[float] = []  # between two steps
        self._executor, self._limits, self._clock = executor, limits, clock
        self._seconds = seconds
        self._skipped: set[Probe] = set()  # for lack of time, in all later rounds too

    async def round(self) -> dict[Probe, float]:
        """The median seconds of each probe for which there is time."""
        took: dict[Probe, float] = {}
        per_token = 0.0  # seconds in the previous step; an upper bound for a larger step
        for probe in probes(self._limits):
            left = self.until - self._clock()
            if probe in self._skipped or (len(took) > 1 and probe.size * per_token > left):
                self._skipped.add(probe)
                continue
            is_first = not self.idle
            took[probe] = median(await self._repeated(probe))
            if is_first:  # the first step brings the weights into memory
                self.until = self._clock() + self._seconds
            per_token = took[probe] / probe.size
        return took

    async def _repeated(self, probe: Probe) -> list[float]:
        """The seconds of several runs of a probe."""
        repeats: list[float] = []
        while _may_repeat(repeats, self._seconds):
            if self._is_awaited():
                raise Awaited
            submitted = self._clock()
            step = probe.step(len(self.idle), self._limits)
            result = await _result(self._executor.submit(step))
            self.idle.append(self._clock() - submitted - result.seconds)
            repeats.append(result.seconds)
        return repeats


def _may_repeat(repeats: Sequence[float], seconds: float) -> bool:
    """Whether a step that took these seconds is run once more, within a limit of `seconds`."""
    return len(repeats) < MAX_REPEATS and sum(repeats) <= REPEAT_SHARE * seconds


async def _result(future: StepFuture) -> StepResult:
    done = asyncio.Event()
    future.add_done_callback(lambda _: done.set())
    await done.wait()
    return future.result()
