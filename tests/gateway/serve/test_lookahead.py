"""When iterations are planned ahead without being told to."""

from dataclasses import replace

import pytest

from engine.cost.model import CostModel
from engine.step import WorkerReport
from gateway.serve import lookahead
from gateway.serve.lookahead import SHORT_STEP, chosen_lookahead, most_lookahead
from gateway.serve.settings import load
from tests.gateway.serve.test_calibration import REPORT


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "_num_cores", lambda: 4)


def steps_of(seconds: float) -> CostModel:
    return CostModel(curve=((1, seconds), (2, seconds)), per_slot=0.0, per_pair=0.0)


def chosen(report: WorkerReport, seconds: float, **flags: str) -> int:
    settings = load(flags)
    found = chosen_lookahead(settings, report, steps_of(seconds))
    assert found <= most_lookahead(settings)
    return found


def test_it_pays_where_steps_are_short_and_a_core_is_left() -> None:
    assert chosen(replace(REPORT, threads=3), SHORT_STEP / 2) == 1
    assert chosen(replace(REPORT, threads=4), SHORT_STEP / 2) == 0
    assert chosen(replace(REPORT, threads=3), SHORT_STEP * 2) == 0


def test_threads_of_all_ranks_count() -> None:
    report = replace(REPORT, threads=2)
    assert chosen(report, SHORT_STEP / 2) == 1
    assert chosen(report, SHORT_STEP / 2, tensor_ranks="2") == 0


def test_a_pipeline_and_a_cluster_have_it_only_when_told_to() -> None:
    assert chosen(REPORT, SHORT_STEP / 2, pipeline_stages="2") == 0
    assert chosen(REPORT, SHORT_STEP / 2, launcher="ray") == 0
    assert chosen(REPORT, SHORT_STEP / 2, pipeline_stages="2", lookahead="1") == 1


def test_a_gpu_always_has_it() -> None:
    assert chosen(replace(REPORT, device="cuda:0", threads=64), 10.0) == 1


@pytest.mark.parametrize("said", [0, 1])
def test_who_says_is_obeyed(said: int) -> None:
    for device in ("cpu", "cuda:0"):
        assert chosen(replace(REPORT, device=device), 10.0, lookahead=str(said)) == said
