import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run, run_here, run_script


def test_10_curl_shows_the_events_to_the_last(server_url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    shown = run(EXAMPLES / "10_stream_with_curl.sh", server_url)
    assert shown.count("data: ") > 2
    assert shown.strip().endswith("data: [DONE]")


def test_20_the_official_python_client_works_in_all_its_ways(server_url: str) -> None:
    shown = run_script("20_openai_python.py", server_url)
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
    shown = run_script("30_leave_early.py", server_url)
    during, after = shown.split("After the client has left")
    assert "podway_requests_running 1.0" in during
    assert "podway_requests_running 0.0" in after
    assert 'podway_kv_slots{state="held",tier="device"} 0.0' in after
    assert "podway_orphan_blocks 0.0" in after
    assert 'podway_aborts_total{reason="client_gone"}' in after


def test_40_the_engine_answers_without_a_server() -> None:
    shown = run_here("40_offline_engine.py", "Hello!", "What is 2 + 3?")
    assert shown.count("> ") == 2
    assert shown.count("mean logprob") == 2


def test_45_adapters_answer_beside_the_base_model() -> None:
    shown = run_here("45_lora_adapters.py")
    answers = [line.partition(": ") for line in shown.splitlines() if ": " in line]
    assert [name for name, _, _ in answers] == ["builtin", "first", "second"]
    assert len({text for _, _, text in answers}) == 3


def test_50_iteration_level_scheduling_is_compared_with_request_level() -> None:
    shown = run_here("50_compare_policies.py", "--requests", "200")
    rows = {line[:16].strip(): line[16:].split() for line in shown.splitlines()[2:]}
    modes = ("grow", "reserve", "request")
    assert rows.keys() == {f"{policy} {mode}" for policy in ("fcfs", "mlfq") for mode in modes}
    mean_jct = {name: float(cells[-1].replace(",", "")) for name, cells in rows.items()}
    assert mean_jct["fcfs grow"] < mean_jct["fcfs request"]


def test_60_a_pipeline_over_two_ray_nodes_survives_a_death() -> None:
    pytest.importorskip("ray")
    shown = run_script("60_ray_cluster.py")
    assert "2 worker(s)" in shown
    assert "60 tokens, 1 restart(s)" in shown
    assert "the same tokens" in shown
