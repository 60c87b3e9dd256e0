import asyncio
from random import Random

from engine.step import Step, StepId, StepResult
from examples.benchmarks.speculation.engines import TimedWorker
from examples.benchmarks.speculation.pairs import median_interval
from examples.benchmarks.speculation.time_slices import SECONDS, SlicedExecutor, TimeSlices


def test_the_interval_of_a_median_is_between_order_statistics() -> None:
    assert median_interval(range(6)) == (0, 5)  # 1 - 2 / 64 is 96.9 %
    assert median_interval(range(12)) == (2, 9)  # as tables of the sign test have it
    assert median_interval(range(20)) == (5, 14)
    assert median_interval([3.0]) == (3.0, 3.0)


class Ticking:
    """A worker whose steps take `seconds` of a clock."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def run(self, step: Step) -> StepResult:
        self._clock[0] += self._seconds
        return StepResult(step.step_id, (), self._seconds)


def test_each_engine_is_charged_its_own_time() -> None:
    clock = [0.0]
    slices = TimeSlices(lambda: clock[0], Random(1))

    async def serve(seconds: float) -> float:
        executor = SlicedExecutor(Ticking(clock, seconds), slices)
        await slices.begin(executor)
        for number in range(100):
            result = await executor.submit(Step(StepId(number), ()))
            assert result.step_id == number
        slices.end(executor)
        return executor.now()

    async def serve_all() -> list[float]:
        return await asyncio.gather(*(serve(SECONDS * share) for share in (0.3, 0.6, 2.0)))

    found = asyncio.run(serve_all())
    for seconds, share in zip(found, (0.3, 0.6, 2.0), strict=True):
        assert abs(seconds - 100 * SECONDS * share) < 1e-9


class Interrupted:
    """A worker that computes for a fifth of the elapsed seconds of its steps."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def run(self, step: Step) -> StepResult:
        self._clock[0] += 0.2
        return StepResult(step.step_id, (), 1.0, proposal_seconds=0.5)


def test_steps_and_their_proposals_are_measured_by_the_same_clock() -> None:
    clock = [0.0]
    result = TimedWorker(Interrupted(clock), lambda: clock[0]).run(Step(StepId(0), ()))
    assert (result.seconds, result.proposal_seconds) == (0.2, 0.1)
