"""Every example runs and shows what it promises."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def test_21_the_official_npm_client_works_in_all_its_ways(server_url: str, tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    directory = EXAMPLES
    if not (EXAMPLES / "node_modules" / "openai").is_dir():
        directory = tmp_path
        for name in ("21_openai_npm.mjs", "package.json"):
            shutil.copy(EXAMPLES / name, tmp_path)
        install = ["npm", "install", "--no-audit", "--no-fund"]
        installed = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True)
        if installed.returncode != 0:
            pytest.skip(f"npm cannot install openai: {installed.stderr.splitlines()[-1:]}")
    shown = run("node", "21_openai_npm.mjs", server_url, cwd=directory)
    assert [line.split(":")[0] for line in shown.splitlines()] == ["whole", "stream", "helper"]


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
