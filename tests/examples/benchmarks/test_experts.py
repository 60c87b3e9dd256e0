import json
from pathlib import Path

import pytest

from engine.worker.cpu.limits import Peak
from tests.examples.benchmarks.published import RESULTS, read
from tests.examples.running import run_here

FILE = "experts/amd_zen5_1_thread.json"


def test_experts_are_measured_beside_dense_linears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a read rate as of an earlier run: measuring it takes seconds."""
    monkeypatch.setattr("engine.worker.cpu.limits.measure_read", lambda _: Peak(1e10, ""))
    file = tmp_path / "figures.json"
    load = ("--formats", "int8", "--rows", "1", "9", "--hidden", "64", "--inner", "32")
    shown = run_here("benchmarks.layers.expert_speed", *load, "--rounds", "2", "--json", file)
    assert shown.count("× dense") == 2
    rows = json.loads(file.read_text())["by_format_and_rows"]["int8"]
    assert rows["1"]["experts_used"] == 8 < rows["9"]["experts_used"] <= 64
    assert all(row["milliseconds"] > 0 for row in rows.values())


def test_the_page_states_what_the_json_says() -> None:
    page = (RESULTS / "experts" / "README.md").read_text()
    found = read(FILE)["by_format_and_rows"]
    expected = [
        f"| {name} | {rows} | {row['experts_used']:.0f} | {row['milliseconds']:.2f} ms | "
        f"{100 * row['share_of_read_rate']:.0f} % | {row['time_of_dense']:.2f} |"
        for name, by_rows in found.items()
        for rows, row in by_rows.items()
    ]
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert table[1:] == expected
