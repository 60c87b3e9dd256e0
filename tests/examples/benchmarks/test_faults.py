import json
from pathlib import Path

import pytest

from examples.benchmarks.attacks import catalog, report
from examples.benchmarks.server import prompt_bounds
from tests.examples.running import run_here, run_module


def test_texts_are_unchanged_when_workers_are_killed() -> None:
    """Every text is compared with its own reference."""
    load = ("--kills", "1", "--streams", "4", "--bodies", "4")
    shown = run_module("benchmarks.server.kill_workers", *load)
    assert "| workers killed | 1" in shown
    assert "| failed or different | 0 |" in shown


def test_answers_are_unchanged_while_everything_fails(tmp_path: Path) -> None:
    """It fails by itself if an answer differs or is missing, or anything is left."""
    load = ("--hours", "0.003", "--rate", "3", "--every", "0.4", "--out", tmp_path)
    assert "0 different or lost" in run_module("benchmarks.server.chaos", *load)
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["faults"]["worker killed"] >= 1
    assert sum(found["tally"]["answers"].values()) > 10


def test_lookahead_is_measured_off_and_on(tmp_path: Path) -> None:
    flags = ("--clients", "2", "--rounds", "1", "--seconds", "0.5", "--out", tmp_path)
    shown = run_module("benchmarks.server.lookahead", *flags)
    assert shown.splitlines()[-1].startswith("| 2 |")
    assert (tmp_path / "lookahead.json").exists()


def test_streams_are_measured_beside_an_attack(tmp_path: Path) -> None:
    name = "rejected requests"
    load = ("--rounds", "1", "--seconds", "1", "--streams", "2", "--only", name)
    head = report.table_head(report.COLUMNS)
    (tmp_path / "README.md").write_text(f"# Attacks\n\n{head}\n| b |\n\n| another |\n")
    run_module("benchmarks.attacks", *load, "--out", tmp_path)
    ((found, result),) = json.loads((tmp_path / "attacks.json").read_text())["attacks"].items()
    assert found == name
    assert len(result["attacked"]) == len(result["undisturbed"]) == 1
    assert result["undisturbed"][0]["chunks"] > 0
    assert result["undisturbed"][0]["ttft"]["p90"] > 0
    assert result["failures"] == []
    assert result["outcomes"].keys() - {"cancelled at the end"} == {"400"}
    page = (tmp_path / "README.md").read_text()
    assert name in page
    assert "| b |" not in page
    assert "| another |" in page


def test_bounds_on_prompts_are_compared(tmp_path: Path) -> None:
    bounds = ("--prefill-slowdown 2", "--itl-goal 100ms")
    load = ("--rounds", "1", "--streams", "2", "--requests", "2", "--tokens", "600")
    model = ("--model", "builtin", "--weights", "auto", "--ids", "300..1500")
    run_here("benchmarks.server.prompt_bounds", tmp_path, *model, *load, "--bounds", *bounds)
    found = json.loads((tmp_path / "prompt_bounds.json").read_text())
    assert (tmp_path / "prompt_bounds.md").read_text() == prompt_bounds.page(found)
    assert [len(found["bounds"][bound]) for bound in bounds] == [1, 1]


def test_memory_is_measured_under_rejected_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "TRAILER_BYTES", 1 << 20)
    monkeypatch.setattr(catalog, "LONG_TEXT", catalog.LONG_TEXT[: 1 << 18])
    load = ("--requests", "100", "--texts", "10", "--out", tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_here("benchmarks.attacks.memory", *load)
    assert not ended.value.code
    found = json.loads((tmp_path / "memory.json").read_text())
    assert [len(sizes) for sizes in found.values()] == [10, 10, 10]
