"""The profile of a machine that is known exactly, and what it does not do: overrun its time."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from engine.cost.model import CostModel
from engine.cost.profiler import Probe, ProbeLimits, Profile, measure, probes
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import Step, StepResult
from engine.worker.model.layout import LayoutLimits, build_layout

QUICK = CostModel(
    curve=((1, 0.002), (64, 0.010), (512, 0.150)), per_slot=2e-7, per_pair=1e-8, per_draw=5e-5
)
BOUNDS = ProbeLimits(64, 512, 4096, 1000, 16)


def profile(true: CostModel, bounds: ProbeLimits, seconds: float) -> tuple[CostModel, float]:
    """The cost model that was found, and the virtual seconds that it took."""

    async def main() -> tuple[CostModel, float]:
        clock = asyncio.get_running_loop().time
        found = await measure(SimulatedExecutor(true), bounds, clock, seconds)
        return found.model, clock()

    return run_virtual(main())


def test_the_seconds_of_prompts_and_batches_are_found() -> None:
    found, _ = profile(QUICK, BOUNDS, 2.0)
    for length in (1, 4, 64, 256, 512):
        assert found.compute(length, 0) == pytest.approx(QUICK.compute(length, 0), rel=0.05)
    assert found.compute(1, 1024) == pytest.approx(QUICK.compute(1, 1024), rel=0.05)
    assert found.idle_step == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("slower", [1, 10, 100])
def test_a_slow_machine_is_measured_in_fewer_steps_within_the_same_time(slower: int) -> None:
    curve = tuple((tokens, seconds * slower) for tokens, seconds in QUICK.curve)
    found, took = profile(CostModel(curve, 2e-7, 1e-8), BOUNDS, 2.0)
    assert took < 3.0
    assert found.compute(1, 0) == pytest.approx(0.002 * slower, rel=0.05)


class WarmingExecutor(SimulatedExecutor):
    """A worker whose steps of a size take four times as long until it has run two of them."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(cost)
        self._runs: Counter[int] = Counter()

    def run(self, step: Step, now: float) -> tuple[StepResult, float]:
        result, at = super().run(step, now)
        self._runs[step.num_tokens] += 1
        if self._runs[step.num_tokens] > 2:
            return result, at
        return replace(result, seconds=4 * result.seconds), at + 3 * result.seconds


def test_fast_steps_are_repeated_until_their_first_slow_runs_do_not_count() -> None:
    async def main() -> CostModel:
        clock = asyncio.get_running_loop().time
        return (await measure(WarmingExecutor(QUICK), BOUNDS, clock, 60.0)).model

    found = run_virtual(main())
    for length in (1, 4, 64):
        assert found.compute(length, 0) == pytest.approx(QUICK.compute(length, 0), rel=0.05)


class LoadingExecutor(SimulatedExecutor):
    """A worker whose first step takes a second more, as it reads weights from a disk."""

    is_loaded = False

    def run(self, step: Step, now: float) -> tuple[StepResult, float]:
        result, at = super().run(step, now)
        late, self.is_loaded = 0.0 if self.is_loaded else 1.0, True
        return replace(result, seconds=result.seconds + late), at + late


def test_a_first_step_that_reads_weights_leaves_the_time_of_the_others() -> None:
    async def sizes(executor: SimulatedExecutor) -> list[int]:
        clock = asyncio.get_running_loop().time
        return [each.num_tokens for each in (await measure(executor, BOUNDS, clock, 1.0)).samples]

    assert run_virtual(sizes(LoadingExecutor(QUICK))) == run_virtual(
        sizes(SimulatedExecutor(QUICK))
    )


class BusyMachine(SimulatedExecutor):
    """Steps that begin in the first `seconds` take three times as long, or all if it ends never;
    with a period other work comes and goes."""

    def __init__(self, cost: CostModel, seconds: float, period: float = 1e9) -> None:
        super().__init__(cost)
        self._busy, self._period = seconds, period

    def run(self, step: Step, now: float) -> tuple[StepResult, float]:
        result, at = super().run(step, now)
        if now % self._period >= self._busy:
            return result, at
        return replace(result, seconds=3 * result.seconds), at + 2 * result.seconds


@pytest.mark.parametrize("busy", [0.0, 0.05, 0.3])
def test_a_machine_that_is_busy_for_a_while_is_measured_until_its_steps_take_the_same_time(
    busy: float,
) -> None:
    async def main() -> Profile:
        clock = asyncio.get_running_loop().time
        return await measure(BusyMachine(QUICK, busy), BOUNDS, clock, 20.0)

    profile = run_virtual(main())
    assert profile.is_stable
    for length in (1, 64, 256):
        expected = QUICK.compute(length, 0)
        assert profile.model.compute(length, 0) == pytest.approx(expected, rel=0.1)


def test_a_profile_beside_work_that_comes_and_goes_is_not_stable() -> None:
    async def main() -> Profile:
        clock = asyncio.get_running_loop().time
        return await measure(BusyMachine(QUICK, 2.7, period=6.0), BOUNDS, clock, 20.0)

    assert not run_virtual(main()).is_stable


def test_two_steps_are_run_however_long_they_take() -> None:
    _, took = profile(CostModel.linear(60.0, 0.5, 0.0), BOUNDS, 2.0)
    assert took == pytest.approx(60.5 + 62.0)


@pytest.mark.parametrize(
    "bounds",
    [
        BOUNDS,
        ProbeLimits(1, 2, 8, 1, 16),
        ProbeLimits(64, 64, 32, 4, 8),
        ProbeLimits(256, 2048, 128, 5000, 1),
        ProbeLimits(3, 7, 4096, 9, 4),
    ],
)
def test_every_probe_is_a_step_that_a_worker_takes(bounds: ProbeLimits) -> None:
    limits = LayoutLimits(10, bounds.max_model_len, bounds.num_blocks, bounds.block_size)
    planned = list(probes(bounds))
    assert planned[0] == Probe(1, 1, 0)
    for probe in planned:
        step = probe.step(0, bounds)
        assert len(step.entries) <= bounds.max_batch_size
        assert step.num_tokens == probe.size <= bounds.max_batch_tokens
        layout = build_layout(step, limits)
        assert len(set(layout.slots.tolist())) == step.num_tokens, "two tokens in one slot"


def test_a_probe_knows_its_own_size_in_the_cost_models_words() -> None:
    linear = CostModel.linear(1.0, 0.0, 0.0)
    parts = CostModel(linear.curve, per_slot=0.5, per_pair=0.25, per_draw=8.0, per_piece=3.0)
    for probe in (Probe(3, 1, 16), Probe(1, 64, 0), Probe(1, 32, 32)):
        step: Step = probe.step(0, BOUNDS)
        size = probe.sample(1.0)
        expected = size.slots * 0.5 + size.pairs * 0.25 + size.num_sampled * 8.0
        expected += size.num_pieces * 3.0
        assert parts.step(step) - 1.0 == pytest.approx(expected)
