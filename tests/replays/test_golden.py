"""The golden schedules come out line by line, played anew and followed event by event."""

from pathlib import Path

import pytest

from engine.simulated.figures import SLO
from engine.simulated.replay import read_recording
from engine.simulated.verify import RecordingVerifier
from tests.replays.playing import GOLDEN, headers, lines

FILES = sorted(GOLDEN.glob("*.jsonl"))


def test_there_is_a_golden_schedule_for_every_policy_and_admission() -> None:
    assert {path.stem: read_recording(path).header for path in FILES} == headers()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_same_load_on_the_same_terms_gives_the_same_lines(path: Path) -> None:
    golden = read_recording(path)
    assert lines(golden.header, golden.arrivals) == path.read_text().splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_same_events_lead_to_the_same_decisions(path: Path) -> None:
    golden = read_recording(path)
    followed = RecordingVerifier(golden).verify(SLO())
    assert followed.difference is None
    assert followed.num_iterations == sum(row.planned is not None for row in golden.rows)


def test_between_them_the_golden_schedules_hold_every_way_to_end() -> None:
    ends = {row.reason for path in FILES for row in read_recording(path).rows if row.reason}
    assert ends >= {"stop", "length", "client_gone", "deadline"}
    rows = [row for path in FILES for row in read_recording(path).rows]
    assert any(row.preempted is not None for row in rows)
    assert {move[0] for row in rows for move in row.moves} == {"in", "out"}
