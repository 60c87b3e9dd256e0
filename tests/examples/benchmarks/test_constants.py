import json
from dataclasses import replace

from examples.benchmarks.virtual_time.constant_scenarios import SCENARIOS
from examples.benchmarks.virtual_time.constants import (
    CALIBRATION,
    OUT,
    REMOVED,
    SWEPT,
    page,
    play,
    ratios,
)


def test_the_page_shows_the_rows_of_all_constants_with_their_committed_values() -> None:
    found = json.loads((OUT / "constants.json").read_text())
    assert (OUT / "README.md").read_text() == page(found)
    rows = {(one["constant"], one["chosen"], one["value"], one["scenario"]) for one in found}
    assert {row for row in rows if row[0] not in REMOVED} == {
        (f"{swept.module}.{swept.name}", swept.chosen, value, name)
        for swept in SWEPT
        for value in swept.values
        for name in swept.scenarios
    }


def test_a_committed_value_is_its_own_multiple_and_another_is_not() -> None:
    growth = next(swept for swept in SWEPT if swept.name == "MAX_GROWTH")
    same = ratios(growth, growth.chosen, "burst", seeds=1)
    assert set(same.values()) == {0.0, 1.0}
    without = ratios(growth, 1.0, "burst", seeds=1)
    assert without["ttft mean"] > 1.0 > without["itl p99"]


def test_speculation_pays_in_the_scenario_of_edits() -> None:
    edits = SCENARIOS["edit"]
    with_drafts, without = play(edits, 0), play(replace(edits, speculation=None), 0)
    assert with_drafts["jct mean"] < 0.9 * without["jct mean"]


def test_every_scenario_is_used() -> None:
    assert {name for swept in SWEPT for name in swept.scenarios} == {*SCENARIOS, CALIBRATION}
