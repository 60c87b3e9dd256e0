"""The GPU check, rehearsed on the CPU: stages fail independently, and results are written early."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.attention.flashinfer.modules import Module as BuildsLibrary
from examples.benchmarks.gpu import __main__ as gpu
from examples.benchmarks.gpu import (
    kernels,
    mixed_steps,
    page,
    plan,
    stages,
    unequal,
)
from tests.engine.worker.cuda.launching import on_stand_ins
from tests.examples.running import ROOT
from tests.models.checkpoints import make_checkpoint

MACHINE = {"device": "NVIDIA H100 80GB HBM3", "when": "2026-11-21T10:00+00:00", "torch": "2.13"}


def fails(seconds: float) -> dict[str, object]:
    raise stages.StageFailed(
        "as expected", {"passed": 3, "skipped": 1, "failed": {"a::b": "why\nnot"}}
    )


def breaks(seconds: float) -> dict[str, object]:
    raise KeyError(seconds)


def test_a_stage_that_fails_or_raises_does_not_stop_the_others() -> None:
    reports: list[int] = []
    outcomes = stages.run_all(
        [
            stages.Stage("one", 5.0, fails),
            stages.Stage("two", 5.0, breaks),
            stages.Stage("three", 5.0, lambda seconds: {"given": seconds}),
        ],
        60.0,
        lambda outcomes: reports.append(len(outcomes)),
        {},
    )
    assert reports == [1, 2, 3]
    assert [outcome.status for outcome in outcomes] == ["failed", "failed", "done"]
    assert outcomes[0].output == "as expected"
    assert outcomes[1].output == "KeyError: 5.0"
    assert outcomes[2].figures == {"given": 5.0}


def test_without_time_a_stage_is_reported_and_not_run() -> None:
    (outcome,) = stages.run_all([stages.Stage("one", 5.0, fails)], 0.5, lambda _: None, {})
    assert outcome.status == "no time"


def test_a_command_is_limited_in_time_and_its_last_lines_are_kept() -> None:
    assert stages.command([sys.executable, "-c", "print(7)"], 60.0) == "7\n"
    with pytest.raises(stages.StageFailed, match="exit code 3\nbye"):
        stages.command([sys.executable, "-c", "print('bye'); exit(3)"], 60.0)
    with pytest.raises(stages.StageFailed, match="still running after 0 s"):
        stages.command([sys.executable, "-c", "input(); input()"], 0.01)


MIXED_STEP: dict[str, Any] = {
    "decodes": 255,
    "pieces": [64],
    "graph": 320,
    "seconds": 0.009,
    "eager_seconds": 0.015,
    "sampled_seconds": None,
}
MIXED = [MIXED_STEP, MIXED_STEP | {"pieces": [], "graph": 256, "sampled_seconds": 0.0092}]


UNEQUAL: dict[str, Any] = {"decodes": 40, "context": 1024, "longest": 32768}
UNEQUAL |= {"seconds": 0.008, "even_seconds": 0.0075}


TIMES = {"torch": 19.1, "64x64x128x1x4x4": 18.4, "64x64x128x2x4x4": 20.0}
PRODUCTS = {"products": {"qkv of 64 rows": {"rows": 64, "microseconds": TIMES}}}
DECODES = {"decodes": {"1x1024": {"floor": 1.0, "FA2": 11.2, "ours": 6.5}}}


def a_run(kind: str, fraction: float) -> dict[str, object]:
    row = {
        "kind": kind,
        "num_requests": 64,
        "num_tokens": 1,
        "context": 1024,
        "seconds": 0.01,
        "pace_seconds": 0.01,
        "worker_seconds": 0.0098,
        "floor_read_seconds": 0.009,
        "floor_compute_seconds": 0.001,
        "bound": "read",
        "fraction": fraction,
        "tokens_per_second": 6400.0,
    }
    limit = {"rate": 3e12, "by": "a device copy"}
    return {
        "shape": "Llama-3.1-8B",
        "in_flight": 2,
        "worker": {"dtype": "bfloat16", "weights": "bfloat16", "attention": "flashinfer"},
        "limits": {"read": limit, "bfloat16": limit},
        "rows": [row],
    }


def test_the_page_shows_figures_beside_goals(tmp_path: Path) -> None:
    busy = {
        "streams": 256,
        "output_tokens_per_second": 20_000.0,
        "failed": 0,
        "as_busy_as_the_worker_alone": 0.93,
    }
    outcomes = [
        stages.Outcome("alone: Llama-3.1-8B", "done", 60.0, a_run("decode", 0.85)),
        stages.Outcome(
            "tests", "failed", 9.0, {"passed": 3, "skipped": 0, "failed": {"a::b": "x"}}
        ),
        stages.Outcome("mixed steps", "done", 30.0, {"shape": "Llama-3.1-8B", "mixed": MIXED}),
        stages.Outcome("unequal lengths", "done", 9.0, {"shape": "Llama", "unequal": [UNEQUAL]}),
        stages.Outcome("server over HTTP", "done", 50.0, busy),
        stages.Outcome("products", "done", 50.0, PRODUCTS),
        stages.Outcome("decodes", "done", 30.0, DECODES),
    ]
    path = page.write(tmp_path, MACHINE, outcomes)
    assert path.name == "nvidia-h100-80gb-hbm3-2026-11-21.md"
    text = path.read_text()
    assert "| Llama-3.1-8B, decode 64 × 1,024, of the limit | 85 % | 80 % | 90 % |" in text
    assert "| idle between those steps, 2 in flight | 2 % | < 3 % |  |" in text
    assert "| 256 streams over HTTP, as busy as the worker alone | 93 % | 90 % |  |" in text
    assert "- `a::b`: x" in text
    assert "| 255 | 64 | 320 | 9.00 | 15.00 | |\n" in text
    assert "| 255 | none | 256 | 9.00 | 15.00 | 9.20 |\n" in text
    assert "| 40 × 1,024 | 32,768 | 8.00 | 7.50 |" in text
    assert "| qkv of 64 rows | 19.1 | 18.4 | 64x64x128x1x4x4 |\n" in text
    assert "| 1x1024 | 1.0 | 11.2 | 6.5 |\n" in text
    figures = json.loads(path.with_suffix(".json").read_text())
    assert [stage["status"] for stage in figures["stages"]] == [
        "done", "failed", "done", "done", "done", "done", "done"
    ]  # fmt: skip


def test_mixed_steps_are_timed_in_their_graph_and_eagerly(tmp_path: Path) -> None:
    found = on_stand_ins(make_checkpoint(tmp_path), max_batch_size=4, max_batch_tokens=96)
    planned = found.device.made[-1].planned
    rows = []
    for case, graph in (((3,), 4), ((3, 9), 64), ((0, 5, 70), 96)):
        before = len(planned)
        rows.append(mixed_steps.measure(found.worker, case, 8, 0.0))
        assert rows[-1]["graph"] == graph
        assert {*planned[before:]} == {graph if case == (3,) else -graph}
    assert all(row["seconds"] > 0.0 and row["eager_seconds"] > 0.0 for row in rows)
    assert [row["sampled_seconds"] is not None for row in rows] == [True, False, False]


def test_decodes_beside_a_long_one_are_timed_and_those_of_equal_lengths(tmp_path: Path) -> None:
    found = on_stand_ins(make_checkpoint(tmp_path), max_batch_size=4, max_batch_tokens=96)
    row = unequal.measure(found.worker, unequal.Case.of("3x4+40"), 0.0)
    assert (row["decodes"], row["context"], row["longest"]) == (3, 4, 40)
    assert row["seconds"] > 0.0
    assert row["even_seconds"] > 0.0


def test_results_are_compared_before_any_speed_is_measured(tmp_path: Path) -> None:
    names = [stage.name for stage in plan.Plan.of("cuda", tmp_path).stages()]
    assert names[:3] == ["Triton kernels", "kernels", "tests"]
    assert names[3:6] == ["products", "decodes", "alone: Llama-3.1-8B"]
    assert names[6] == "alone: Llama-3.1-8B --weights fp8 --kv-cache-dtype fp8"
    others = {"Qwen3-30B-A3B", "gpt-oss-20b", "DeepSeek-V2-Lite"}
    assert {"unequal lengths", *(f"alone: {each}" for each in others)} < {*names}


def test_the_results_of_pytest_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="t" name="good">'
        '<properties><property name="swaps" value="3"/></properties></testcase>'
        '<testcase classname="t" name="bad"><failure message="no"/></testcase>'
        '<testcase classname="t" name="idle"><skipped/></testcase></testsuite></testsuites>'
    )
    figures = plan.read_results(path)
    counts = {"passed": 1, "skipped": 1, "failed": {"t::bad": "no"}}
    assert figures == counts | {"numbers": {"good": {"swaps": "3"}}}
    text = page.page(MACHINE, [stages.Outcome("swapping", "done", 9.0, figures)])
    assert "## swapping\n\n- `good`: swaps 3\n" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_missing_requirement_is_named() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "examples.benchmarks.gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("the GPU check cannot run here: ")
    assert len(ended.stderr.splitlines()) == 1


def test_finished_stages_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    done = stages.Outcome("one", "done", 9.0, {"figure": 1})
    path = page.write(tmp_path, MACHINE, [done, stages.Outcome("two")])
    finished = page.read(path.with_suffix(".json"))
    assert finished == {"one": done}
    outcomes = stages.run_all(
        [stages.Stage("one", 5.0, breaks), stages.Stage("two", 5.0, lambda seconds: {"figure": 2})],
        60.0,
        lambda _: None,
        finished,
    )
    assert [outcome.figures for outcome in outcomes] == [{"figure": 1}, {"figure": 2}]


def test_rows_measured_before_a_stage_ran_out_of_time_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_slow(words: list[str], seconds: float) -> str:
        (tmp_path / "alone.json").write_text('{"rows": [7]}')
        raise stages.StageFailed("still running")

    monkeypatch.setattr(plan, "command", too_slow)
    the_plan = plan.Plan.of("cpu", tmp_path)
    with pytest.raises(stages.StageFailed, match="still running") as failure:
        plan.run_alone(the_plan, the_plan.alone[0], 1.0)
    assert failure.value.figures == {"rows": [7]}


@dataclass
class Module:
    """A module of FlashInfer's, as far as builds are concerned."""

    name: str
    jit_library_path: Path
    is_aot: bool = False


def test_builds_report_each_module_and_one_that_fails_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [Module(name, tmp_path / name) for name in ("fa2", "window", "fp8", "wide")]
    (tmp_path / "fa2").touch()  # of an earlier build
    calls: list[list[str]] = []

    def build(specs: Sequence[BuildsLibrary]) -> None:
        calls.append([each.name for each in specs])
        for each in specs:
            if each.name == "window":
                raise RuntimeError(
                    "ninja failed\n[1/2] nvcc fa2.cu\nfa2.cu(7): error: no such type"
                )
            Path(each.jit_library_path).touch()

    path = tmp_path / "kernels.json"
    kernels.build_all(modules, build, path)
    assert calls == [["window", "fp8", "wide"], ["window"], ["fp8"], ["wide"]]
    figures = json.loads(path.read_text())
    assert (figures["modules"], figures["cached"], figures["left"]) == (4, ["fa2"], [])
    assert figures["failed"] == {"window": "fa2.cu(7): error: no such type"}
    assert sorted(figures["built"]) == ["fp8", "wide"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "building 3 of 4 modules",
        "the build ended early: ninja failed",
        "cannot build window: fa2.cu(7): error: no such type (2 of 4)",
    ]
    assert {line.split(",")[0] for line in lines[3:]} == {"built fp8", "built wide"}
    assert lines[-1].endswith("(4 of 4)")


def test_the_modules_of_the_first_figures_are_built_first(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [Module(name, Path(name)) for name in ("fa2", "window", "fp8")]
    calls: list[list[str]] = []
    monkeypatch.setattr(kernels, "specs", lambda: modules)
    monkeypatch.setattr(
        kernels, "build_side_by_side", lambda some: calls.append([each.name for each in some])
    )
    kernels.llama_first(modules)
    kernels.llama_first(modules[2:])
    assert calls == [["fa2"], ["window", "fp8"], ["fp8"]]


def test_modules_built_before_the_stage_ran_out_of_time_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"modules": 2, "cached": [], "built": {"fa2": 3.0}, "failed": {}, "left": ["window"]}

    def too_slow(words: list[str], seconds: float, *, shows: bool) -> str:
        assert shows
        Path(words[words.index("--json") + 1]).write_text(json.dumps(figures))
        raise stages.StageFailed("still running")

    monkeypatch.setattr(plan, "command", too_slow)
    stage = stages.Stage("kernels", 5.0, partial(plan.build_kernels, plan.Plan.of("cpu", tmp_path)))
    outcome = stages.run_one(stage, 60.0)
    assert (outcome.status, outcome.figures) == ("failed", figures)
    assert page.summary(outcome) == "failed: 1 of 2 modules built"


def test_a_program_that_times_kernels_writes_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(words: list[str], seconds: float) -> str:
        assert words[1:3] == ["-m", "examples.benchmarks.gpu.decodes"]
        Path(words[words.index("--json") + 1]).write_text(json.dumps(DECODES))
        return ""

    monkeypatch.setattr(plan, "command", written)
    assert plan.time_kernels(plan.Plan.of("cuda", tmp_path), "decodes", 9.0) == DECODES


def test_a_command_can_show_its_output_while_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert stages.command([sys.executable, "-c", "print(7)"], 60.0, shows=True) == "7\n"
    assert capfd.readouterr().out == "7\n"


def test_the_callers_python_path_reaches_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/site")
    show = "import os; print(os.environ['PYTHONPATH'])"
    assert stages.command([sys.executable, "-c", show], 60.0) == f"{ROOT}:/site\n"


def test_on_a_gpu_kernels_are_built_first_and_only_tests_that_need_one_are_collected(
    tmp_path: Path,
) -> None:
    on_gpu = plan.Plan.of("cuda", tmp_path)
    assert [stage.name for stage in on_gpu.stages()][:2] == ["Triton kernels", "kernels"]
    assert all((ROOT / each).exists() for each in plan.GPU_TESTS)
    assert on_gpu.tests[: len(plan.GPU_TESTS)] == plan.GPU_TESTS
    without = plan.Plan.of("cuda", tmp_path, has_flashinfer=False)
    assert without.attention == "reference"
    assert without.stages()[0].name == "Triton kernels"
    assert not {"kernels", "decodes"} & {stage.name for stage in without.stages()}


def test_all_stages_are_rehearsed_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits as those of an earlier run; measuring them has a test of its own."""
    plan_of, out = plan.Plan.of, tmp_path / "out"
    limits = {name: {"rate": 1e10, "by": "a"} for name in ("read", "float32", "bfloat16", "int8")}

    def with_limits(device: str, folder: Path, **more: Any) -> plan.Plan:
        (folder / "limits.json").write_text(json.dumps({"limits": limits}))
        return plan_of(device, folder, **more)

    monkeypatch.setattr(plan.Plan, "of", with_limits)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ["--device", "cpu", "--out", str(out), "--minutes", "12"]
    monkeypatch.setattr(sys, "argv", ["gpu", *flags])
    assert gpu.main() == 0
    (written,) = out.glob("*.md")
    text = written.read_text()
    assert "| alone: TINY | done |" in text
    assert re.search(r"\| 4 \| none \| none( \| \d+\.\d\d){3} \|\n", text)
    assert re.search(r"\| 3 \| 5 \| none( \| \d+\.\d\d){2} \| \|\n", text)
    assert re.search(r"\| tests \| done: [1-9]\d* passed, 0 failed, ", text)
    assert re.search(r"`test_streams_go_on.*: seconds from .*, same texts 6 of 6\n", text)
    assert re.search(r"`test_speculation_.*: accepted drafts .*, same texts 6 of 6\n", text)
    assert "0 requests failed |" in text
    assert "| 8 streams over HTTP, as busy as the worker alone |" in text
