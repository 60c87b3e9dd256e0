import asyncio
import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.cost.live import FIRST_FIT, LiveCost
from engine.cost.model import UNMEASURED, CostModel
from engine.cost.profiler import ProbeLimits
from engine.errors import WorkerLost
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import Step, StepResult
from engine.worker_settings import WorkerReport
from gateway.serve.cost.calibration import Calibration, calibrate, cost_facts, cost_file
from gateway.serve.saved import SavedFile
from tests.engine.cost.test_live import mixed_step

TRUE = CostModel.linear(per_step=0.01, per_token=0.001, per_slot=0.0)
FACTS: dict[str, object] = {"model": "/models/demo", "cores": 2}
REPORT = WorkerReport("Demo", 10, "float32", "cpu", "cpu", 97, 128, (2,), 100, 16, 64, 1)


class Counting(SimulatedExecutor):
    """Counts its steps; without `lives` every one is lost."""

    def __init__(self, lives: bool = True) -> None:
        super().__init__(TRUE)
        self.num_steps = 0
        self._lives = lives

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        self.num_steps += 1
        future = super().submit(step)
        if not self._lives:
            future.set_exception(WorkerLost("the worker died"))
        return future


def calibrated(how: str, file: SavedFile, executor: Counting) -> Calibration:
    bounds = ProbeLimits(8, 64, 128, 100, 16)
    return run_virtual(calibrate(how, file, executor, bounds))


def test_a_measured_cost_model_is_used_by_the_next_start(tmp_path: Path) -> None:
    file = cost_file(FACTS, tmp_path)
    first, second = Counting(), Counting()
    measured = calibrated("auto", file, first)
    assert first.num_steps > 4
    assert "measured" in str(measured)
    found = calibrated("auto", file, second)
    assert second.num_steps == 0
    assert found.model == measured.model
    assert str(file.path) in str(found)


@pytest.mark.parametrize(
    ("slowdown", "is_kept"), [(0.5, False), (0.8, True), (1.2, True), (2.0, False)]
)
def test_a_calibration_that_iterations_refute_is_measured_again(
    tmp_path: Path, slowdown: float, is_kept: bool
) -> None:
    file = cost_file(FACTS, tmp_path)
    file.save(asdict(TRUE))
    cost, step = LiveCost(TRUE), mixed_step(8, 0)
    for _ in range(10 * FIRST_FIT):
        cost.observe(step, slowdown * TRUE.step(step))
    Calibration(TRUE, file, "").update(cost)
    next_start = Counting()
    calibrated("auto", file, next_start)
    assert (next_start.num_steps == 0) is is_kept


class Unsteady(Counting):
    """Each step takes longer than the one before."""

    def run(self, step: Step, now: float) -> tuple[StepResult, float]:
        result, at = super().run(step, now)
        late = 0.03 * self.num_steps * result.seconds
        return replace(result, seconds=result.seconds + late), at + late


def test_what_was_measured_beside_other_work_is_used_but_not_saved(tmp_path: Path) -> None:
    file = cost_file(FACTS, tmp_path)
    found = calibrated("auto", file, Unsteady())
    assert found.model != UNMEASURED
    assert "the next start measures again" in str(found)
    assert file.load(CostModel.parse) is None


def test_measure_measures_again_and_none_does_not_measure(tmp_path: Path) -> None:
    file = cost_file(FACTS, tmp_path)
    file.save(asdict(UNMEASURED))
    again, never = Counting(), Counting()
    assert calibrated("measure", file, again).model != UNMEASURED
    assert again.num_steps > 4
    assumed = calibrated("none", file, never)
    assert (assumed.model, assumed.file, never.num_steps) == (UNMEASURED, None, 0)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"facts": FACTS}).encode(),
        json.dumps({"facts": FACTS, "cost": {"curve": [[1, -1], [2, 1]]}}).encode(),
    ],
)
def test_a_saved_cost_that_is_none_is_ignored_with_one_line(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = cost_file(FACTS, tmp_path)
    file.path.parent.mkdir()
    file.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.load(CostModel.parse) is None
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert "measured" in str(calibrated("auto", file, Counting()))
    assert file.load(CostModel.parse) is not None


def test_a_cache_that_cannot_be_written_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "costs").write_text("not a directory")
    with caplog.at_level(logging.WARNING):
        calibrated("measure", cost_file(FACTS, tmp_path), Counting())
    assert len(caplog.records) == 1
    assert os.listdir(tmp_path) == ["costs"]


def test_a_worker_that_dies_while_measured_does_not_stop_the_start(tmp_path: Path) -> None:
    assert calibrated("auto", cost_file(FACTS, tmp_path), Counting(lives=False)).model == UNMEASURED


def test_other_weights_config_or_machine_have_another_cost_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    paths = [cost_file(cost_facts(tmp_path, REPORT, 1, 1), tmp_path).path]
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    paths.append(cost_file(cost_facts(tmp_path, REPORT, 1, 1), tmp_path).path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    paths.append(cost_file(cost_facts(tmp_path, REPORT, 1, 1), tmp_path).path)
    paths.append(cost_file(cost_facts(tmp_path, REPORT, 2, 1), tmp_path).path)
    assert len(set(paths)) == 4
    assert cost_file(cost_facts(tmp_path, REPORT, 2, 1), tmp_path).path == paths[-1]


@pytest.mark.parametrize("num_steps", [0, 1, 10])
def test_a_request_does_not_wait_until_everything_is_measured(
    tmp_path: Path, num_steps: int
) -> None:
    file, executor = cost_file(FACTS, tmp_path), Counting()
    bounds = ProbeLimits(8, 64, 128, 100, 16)

    def comes_now() -> bool:
        return executor.num_steps >= num_steps

    found = run_virtual(calibrate("auto", file, executor, bounds, comes_now))
    assert found.model == UNMEASURED
    assert "since a request came before it was measured" in str(found)
    assert file.load(CostModel.parse) is None
    assert executor.num_steps == num_steps
    whole = Counting()
    run_virtual(calibrate("measure", file, whole, bounds, lambda: True))
    assert whole.num_steps > 10
    assert file.load(CostModel.parse) is not None
