from dataclasses import replace
from pathlib import Path

import pytest

from engine.control.admission import Admission
from engine.simulated.figures import SLO
from engine.simulated.replay import RecordedRequest, read_recording
from engine.simulated.verify import RecordingVerifier
from tests.replays.playing import GOLDEN, NUM_REQUESTS, OF_RESEARCH, header, headers, lines, load

FILES = sorted([*GOLDEN.glob("*.jsonl"), *OF_RESEARCH.glob("*.jsonl")])


def test_there_is_a_golden_schedule_for_every_policy_and_admission() -> None:
    assert {path.stem: read_recording(path).header for path in FILES} == headers()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_same_load_with_the_same_settings_gives_the_same_lines(path: Path) -> None:
    golden = read_recording(path)
    assert lines(golden.header, golden.arrivals) == path.read_text().splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_same_events_lead_to_the_same_decisions(path: Path) -> None:
    golden = read_recording(path)
    followed = RecordingVerifier(golden).verify(SLO())
    assert followed.difference is None
    assert followed.num_iterations == sum(row.planned is not None for row in golden.rows)


def test_a_schedule_in_which_clients_take_turns_is_followed_from_its_recording(
    tmp_path: Path,
) -> None:
    clients = ["many"] * 8 + ["few"] * (NUM_REQUESTS - 8)
    arrivals = [*map(_of_client, load(), clients)]
    setup = header("fcfs", Admission.GROW)
    written, one_client = (
        lines(setup, arrivals),
        lines(setup, [_of_client(each, "many") for each in arrivals]),
    )
    assert _planned(written) != _planned(one_client)
    path = tmp_path / "turns.jsonl"
    path.write_text("\n".join(written))
    assert RecordingVerifier(read_recording(path)).verify(SLO()).difference is None


def _of_client(each: RecordedRequest, client: str) -> RecordedRequest:
    assert each.params is not None
    return replace(each, at=0.0, params=replace(each.params, client=client))


def _planned(written: list[str]) -> list[str]:
    return [line for line in written if "planned" in line]


def test_together_the_golden_schedules_have_every_way_to_end() -> None:
    ends = {row.reason for path in FILES for row in read_recording(path).rows if row.reason}
    assert ends >= {"stop", "length", "client_gone", "deadline"}
    rows = [row for path in FILES for row in read_recording(path).rows]
    assert any(row.preempted is not None for row in rows)
    assert {move[0] for row in rows for move in row.moves} == {"in", "out"}
