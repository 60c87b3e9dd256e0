"""The trial run: what it adds to the profile of a machine that is known exactly."""

import asyncio
from dataclasses import replace

import pytest

from engine.cost.model import CostModel
from engine.cost.profiler import ProbeLimits, measure
from engine.errors import StepFailed
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import Step, StepResult
from gateway.serve.cost.calibration import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    Measured,
    measured,
    waves,
)

TRUE = CostModel(
    ((1, 0.002), (64, 0.01), (256, 0.04)), 2e-7, 1e-8, idle_step=0.0005, idle_entry=0.0001
)
LIMITS = ProbeLimits(8, 256, 4096, 1000, 16)


class SlowerBetween(SimulatedExecutor):
    """A worker whose steps take half as long again if they read blocks of different requests."""

    def run(self, step: Step, now: float) -> tuple[StepResult, float]:
        result, at = super().run(step, now)
        first = {bytes(entry.blocks)[:4] for entry in step.entries}
        if len(first) == 1:
            return result, at
        return replace(result, seconds=1.5 * result.seconds), at + 0.5 * result.seconds


class FailsInTrial(SimulatedExecutor):
    """A worker that fails the steps of a scheduler, whose ids are below those of the profiler."""

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        if step.step_id >= 1 << 40:
            return super().submit(step)
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_exception(StepFailed("out of memory"))
        return future


def start_model(executor: SimulatedExecutor, limits: ProbeLimits = LIMITS) -> CostModel:
    """The cost model that is measured at the start, in virtual time."""

    async def main() -> CostModel:
        return (await measured(executor, limits, asyncio.get_running_loop().time)).model

    return run_virtual(main())


def test_the_model_at_the_start_has_the_time_of_the_event_loop_between_steps() -> None:
    found = start_model(SimulatedExecutor(TRUE))
    assert found.idle_step == pytest.approx(0.0005, rel=0.02)
    assert found.idle_entry == pytest.approx(0.0001, rel=0.02)
    for length in (1, 16, 64, 256):
        assert found.compute(length, 0) == pytest.approx(TRUE.compute(length, 0), rel=0.05)


def test_batches_are_measured_with_the_blocks_of_different_requests() -> None:
    found = start_model(SlowerBetween(TRUE))
    assert found.decodes(8, 800) == pytest.approx(1.5 * TRUE.decodes(8, 800), rel=0.1)
    assert found.compute(1, 0) == pytest.approx(TRUE.compute(1, 0), rel=0.1)


def test_waves_grow_to_a_whole_batch_in_the_given_time() -> None:
    found = list(waves(LIMITS, TRUE, 2.0))
    assert {len(wave) for wave in found} == {1, 2, 4, 8}
    for prompt, output in (lengths for wave in found for lengths in wave):
        assert 1 <= prompt <= LONGEST_PROMPT
        assert 1 <= output <= LONGEST_OUTPUT
    tokens = sum(prompt for wave in found for prompt, _ in wave)
    assert 0.0 < TRUE.tokens(tokens) < 2.0


@pytest.mark.parametrize(
    ("limits", "cost"),
    [
        (replace(LIMITS, pools=True), TRUE),
        (LIMITS, CostModel.linear(10.0, 0.0, 0.0)),
    ],
)
def test_without_a_trial_run_the_model_is_that_of_the_profile(
    limits: ProbeLimits, cost: CostModel
) -> None:
    assert start_model(SimulatedExecutor(cost), limits) == profile_model(cost, limits)


def test_if_the_trial_run_fails_the_model_is_that_of_the_profile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert start_model(FailsInTrial(TRUE)) == profile_model(TRUE, LIMITS)
    assert "a request of the trial run failed" in caplog.text


class CountsTrial(SimulatedExecutor):
    """Counts the requests of the trial run; step ids are as in `FailsInTrial`."""

    num_requests = 0

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        if step.step_id < 1 << 40:
            self.num_requests += sum(entry.start == 0 for entry in step.entries)
        return super().submit(step)


def test_a_request_that_comes_in_the_trial_run_waits_for_one_wave_at_most() -> None:
    executor = CountsTrial(TRUE)

    async def main() -> Measured:
        clock = asyncio.get_running_loop().time
        return await measured(executor, LIMITS, clock, lambda: executor.num_requests >= 5)

    found = run_virtual(main())
    assert 5 <= executor.num_requests < 5 + LIMITS.max_batch_size
    assert found == (profile_model(TRUE, LIMITS), False)


def profile_model(cost: CostModel, limits: ProbeLimits) -> CostModel:
    """The cost model of the profiler's steps alone."""

    async def main() -> CostModel:
        clock = asyncio.get_running_loop().time
        return (await measure(SimulatedExecutor(cost), limits, clock, 2.0)).model

    return run_virtual(main())
