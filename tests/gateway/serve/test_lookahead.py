from dataclasses import replace

import pytest

from engine.cost.model import CostModel
from engine.worker_settings import WorkerReport
from gateway.serve import lookahead
from gateway.serve.lookahead import SHORT_STEP, choose_lookahead, max_lookahead
from gateway.settings.settings import load
from tests.gateway.serve.test_calibration import REPORT


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "cores_of_machine", lambda: range(4))


def steps_of(seconds: float) -> CostModel:
    return CostModel(curve=((1, seconds), (2, seconds)), per_slot=0.0, per_pair=0.0)


def chosen(report: WorkerReport, seconds: float, **flags: str) -> int:
    settings = load(flags)
    found = choose_lookahead(settings, report, steps_of(seconds))
    assert found <= max_lookahead(settings)
    return found


def test_lookahead_is_on_where_steps_are_short_and_a_core_is_idle() -> None:
    assert chosen(replace(REPORT, threads=3), SHORT_STEP / 2) == 1
    assert chosen(replace(REPORT, threads=4), SHORT_STEP / 2) == 0
    assert chosen(replace(REPORT, threads=3), SHORT_STEP * 2) == 0


def test_threads_of_all_ranks_count() -> None:
    report = replace(REPORT, threads=2)
    assert chosen(report, SHORT_STEP / 2) == 1
    assert chosen(report, SHORT_STEP / 2, tensor_ranks="2") == 0


def test_a_pipeline_and_a_cluster_have_lookahead_only_if_it_is_set() -> None:
    assert chosen(REPORT, SHORT_STEP / 2, pipeline_stages="2") == 0
    assert chosen(REPORT, SHORT_STEP / 2, launcher="ray") == 0
    assert chosen(REPORT, SHORT_STEP / 2, pipeline_stages="2", lookahead="1") == 1


def test_a_gpu_always_has_lookahead() -> None:
    assert chosen(replace(REPORT, device="cuda:0", threads=64), 10.0) == 1


@pytest.mark.parametrize("said", [0, 1])
def test_an_explicit_lookahead_is_used(said: int) -> None:
    for device in ("cpu", "cuda:0"):
        assert chosen(replace(REPORT, device=device), 10.0, lookahead=str(said)) == said
