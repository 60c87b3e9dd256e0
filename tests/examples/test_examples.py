"""Every example runs and shows what it promises."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.dialects import load_chat_template
from engine.step import WorkerSettings
from engine.worker.process.worker import Worker

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What servers of the examples measure goes into the test's directory."""
    monkeypatch.setenv("PODWAY_CACHE_DIR", str(tmp_path / "cache"))


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What the command shows; a failure shows what it said."""
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_10_curl_shows_the_events_to_the_last(server_url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    shown = run(EXAMPLES / "10_stream_with_curl.sh", server_url)
    assert shown.count("data: ") > 2
    assert shown.strip().endswith("data: [DONE]")


def test_20_the_official_python_client_works_in_all_its_ways(server_url: str) -> None:
    shown = run(sys.executable, EXAMPLES / "20_openai_python.py", server_url)
    assert {line.split(":")[0] for line in shown.splitlines()} == {
        "whole",
        "stream",
        "helper",
        "async",
    }
    assert shown.count("async:") == 4
    assert "tokens)" in shown


def run_node(script: str, url: str, packages: Path) -> str:
    """What an .mjs example shows, with the packages of `examples/package.json`."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    directory = EXAMPLES
    if not (EXAMPLES / "node_modules" / "ai").is_dir():
        directory = packages
        for name in (script, "package.json"):
            shutil.copy(EXAMPLES / name, packages)
        install = ["npm", "install", "--no-audit", "--no-fund"]
        installed = subprocess.run(install, cwd=packages, capture_output=True, text=True)
        if installed.returncode != 0:
            pytest.skip(f"npm cannot install: {installed.stderr.splitlines()[-1:]}")
    return run("node", script, url, cwd=directory)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("npm")


def test_21_the_official_npm_client_works_in_all_its_ways(server_url: str, packages: Path) -> None:
    shown = run_node("21_openai_npm.mjs", server_url, packages)
    assert [line.split(":")[0] for line in shown.splitlines()] == [
        "whole", "stream", "helper", "tool",
    ]  # fmt: skip
    assert "get_weather {" in shown


def test_22_the_ai_sdk_answers_whole_and_streaming(server_url: str, packages: Path) -> None:
    whole, stream, called = run_node("22_ai_sdk.mjs", server_url, packages).splitlines()
    assert re.search(r"weather -> sunny in \w+", called), called
    for line in (whole, stream):
        assert re.search(r"\S+ +\(stop, \d+ tokens\)$", line), line


def test_30_nothing_is_left_behind_by_a_client_that_leaves(server_url: str) -> None:
    shown = run(sys.executable, EXAMPLES / "30_leave_early.py", server_url)
    during, after = shown.split("After we left")
    assert "podway_requests_running 1.0" in during
    assert "podway_requests_running 0.0" in after
    assert 'podway_kv_slots{state="held",tier="device"} 0.0' in after
    assert "podway_orphan_blocks 0.0" in after
    assert 'podway_aborts_total{reason="client_gone"}' in after


def test_40_the_engine_answers_without_a_server() -> None:
    shown = run(sys.executable, EXAMPLES / "40_offline_engine.py", "Hello!", "What is 2 + 3?")
    assert shown.count("> ") == 2
    assert "iterations" in shown


def test_50_iteration_level_scheduling_is_compared_with_request_level() -> None:
    shown = run(sys.executable, EXAMPLES / "50_compare_policies.py", "--requests", "200")
    rows = {line[:16].strip(): line[16:].split() for line in shown.splitlines()[2:]}
    modes = ("grow", "reserve", "request")
    assert rows.keys() == {f"{policy} {mode}" for policy in ("fcfs", "mlfq") for mode in modes}
    mean_jct = {name: float(cells[-1].replace(",", "")) for name, cells in rows.items()}
    assert mean_jct["fcfs grow"] < mean_jct["fcfs request"]


def test_51_both_schedulings_are_measured_on_a_real_server() -> None:
    shown = run(
        sys.executable,
        EXAMPLES / "51_iteration_against_request.py",
        *("--rates", "40", "--seconds", "0.5", "--output-tokens", "1..8"),
    )
    heads, row = shown.splitlines()[:2]
    assert "grow req/s, ms/token" in heads
    assert "request req/s, ms/token" in heads
    assert all(float(cell) > 0 for cell in row.split())


def test_60_training_writes_a_checkpoint_that_answers(tmp_path: Path) -> None:
    train = EXAMPLES / "60_train_builtin_model.py"
    run(sys.executable, train, "--out", tmp_path, "--steps", "2", "--threads", "1")
    worker = Worker.load(WorkerSettings(str(tmp_path)), lambda what, done, total: None)
    assert worker.report.architecture == "LlamaForCausalLM"
    assert load_chat_template(tmp_path) is not None


def test_61_the_built_in_model_is_examined_through_a_server(server_url: str) -> None:
    evaluate = EXAMPLES / "61_evaluate_builtin_model.py"
    shown = run(sys.executable, evaluate, "--url", server_url, "--each", "1")
    assert "overall" in shown


def test_70_a_streamed_token_is_weighed_against_a_bare_write(tmp_path: Path) -> None:
    cost, profile = EXAMPLES / "70_streaming_cost.py", tmp_path / "profile.txt"
    load = ("--streams", "1", "--seconds", "0.3", "--settle", "0.1")
    shown = run(sys.executable, cost, *load, "--profile", profile)
    assert {"bare write", "gateway"} <= {line[:20].strip() for line in shown.splitlines()}
    assert "scheduler.py" in profile.read_text()


def test_71_a_whole_server_is_measured_with_two_clients() -> None:
    shown = run(
        sys.executable,
        EXAMPLES / "71_front_end.py",
        EXAMPLES.parent / "adapters" / "builtin",
        *("-c", "4", "-n", "8", "--output-tokens", "4", "--highest-id", "300"),
    )
    assert shown.count("bench, ") == shown.count("raw, ") == 2


def test_72_both_weight_formats_read_the_same_texts() -> None:
    shown = run(sys.executable, EXAMPLES / "72_int8_quality.py", "--tokens", "4")
    figures = dict(line.rsplit("  ", 1) for line in shown.splitlines() if "  " in line)
    assert float(figures["divergence, mean   "].split()[0]) < 0.01
    assert shown.splitlines()[-2].endswith("%")


def test_72_both_forms_of_kv_read_the_same_texts() -> None:
    formats = ("--weights", "float32", "--kv-cache-dtype", "bfloat16")
    shown = run(sys.executable, EXAMPLES / "72_int8_quality.py", "--tokens", "4", *formats)
    figures = dict(line.rsplit("  ", 1) for line in shown.splitlines() if "  " in line)
    assert 0 < float(figures["divergence, mean   "].split()[0]) < 0.001


def test_73_attention_is_timed_in_every_form_of_kv() -> None:
    script = EXAMPLES / "73_attention_speed.py"
    few = ("--seconds", "0.001", "--contexts", "16", "--batch", "2")
    shown = run(sys.executable, script, *few).splitlines()
    assert shown[0].split(" | ")[2:-1] == ["float32", "float16", "bfloat16", "int8"]
    assert len(shown) == 2 + 2 * 2


def test_80_the_headline_is_written_as_table_plot_and_figures(tmp_path: Path) -> None:
    run(sys.executable, EXAMPLES / "80_orca_headline.py", "--out", tmp_path, "--requests", "20")
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "orca.json", "orca.png"}


def test_81_a_trace_is_played_twice_alike() -> None:
    sample = EXAMPLES.parent / "tests" / "data" / "azure_2023_conv_first_1000.csv.gz"
    shown = run(sys.executable, EXAMPLES / "81_azure_hour.py", sample, "--twice")
    assert "identical" in shown


def test_82_the_headline_of_fastserve_is_written_likewise(tmp_path: Path) -> None:
    script = EXAMPLES / "82_fastserve_headline.py"
    shown = run(sys.executable, script, "--out", tmp_path, "--requests", "12")
    files = {"README.md", "fastserve.json", "fastserve.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert "| MLFQ, 30 s |" in shown


def test_93_random_schemas_are_held_to_on_random_weights() -> None:
    script = EXAMPLES / "93_random_schemas.py"
    shown = run(sys.executable, script, "--schemas", "30", "--max-tokens", "100")
    assert int(shown.split("finished and valid")[1].split()[0]) >= 10
    assert "mask of a token, median" in shown


def test_92_two_grammar_libraries_are_compared() -> None:
    pytest.importorskip("xgrammar")
    script = EXAMPLES / "92_compare_grammar_libraries.py"
    shown = run(sys.executable, script, "--random", "2", "--vocabulary", "600")
    rows = [line for line in shown.splitlines() if line.startswith("| llguidance")]
    assert len(rows) == 2
    assert all(row.split("|")[6].strip() == "0" for row in rows)  # wrong


def test_83_policies_are_compared_on_the_real_engine(tmp_path: Path) -> None:
    compare, out = EXAMPLES / "83_real_engine.py", tmp_path / "out"
    shown = run(sys.executable, compare, "--quick", "6", "--clock", "cpu", "--out", out)
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "figures.json",
        "jct_mlfq.png",
        "jct_skewed.png",
    }
    for policy in ("fcfs", "mlfq", "fair", "deadline", "no reuse"):
        assert f"| {policy} |" in shown


def test_84_the_simulator_is_held_against_the_real_engine(tmp_path: Path) -> None:
    compare = EXAMPLES / "84_simulator_accuracy.py"
    flags = (
        "--tiny",
        "--clock",
        "cpu",
        "--requests",
        "12",
        "--repeats",
        "1",
        "--loads",
        "1",
        "--out",
        tmp_path,
    )
    run(sys.executable, compare, *flags)
    page = (tmp_path / "README.md").read_text()
    assert page.count("| measured |") == 2
    assert page.count("| cost from a recording |") == 2
    assert "2 of 2 rows came out\nthe same" in page


def test_93_a_pipeline_over_two_ray_nodes_survives_a_death() -> None:
    pytest.importorskip("ray")
    shown = run(sys.executable, EXAMPLES / "93_ray_cluster.py")
    assert "2 worker(s)" in shown
    assert "60 tokens, 1 restart(s)" in shown
    assert "the same tokens" in shown


def test_92_a_pipeline_is_measured_and_simulated(tmp_path: Path) -> None:
    flags = ("--requests", "2", "--repeats", "1", "--queue", "1", "--out", tmp_path)
    shown = run(sys.executable, EXAMPLES / "92_pipeline.py", *flags)
    assert "| **2 stages, two batches of 8 in flight** |" in shown
    assert "| pipelined iterations (Orca) |" in shown
    assert {path.name for path in tmp_path.iterdir()} >= {"README.md", "pipeline.json"}
