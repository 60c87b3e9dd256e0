import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.control.event_recorder import EventRecorder, RecordingHeader, Row, render
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.errors import EngineError, StepFailed, WorkerLost
from engine.kv_shape import KVShape
from engine.media import EncoderReport, Media
from engine.policy import PolicySettings
from engine.request import Request, RequestSpec
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.figures import SLO
from engine.simulated.play import play_all
from engine.simulated.replay import BadRecording, RecordedRequest, Recording, read_recording
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import Arrival
from engine.simulated.verify import RecordingVerifier
from engine.step import SamplingParams, Step, StepResult
from tests.blank import blank
from tests.replays.playing import GOLDEN, lines, load, policy

TRUE = CostModel(
    curve=((1, 0.25), (8, 0.5), (24, 2.0)),
    per_slot=1e-3,
    per_pair=1e-3,
    per_draw=0.0625,
    idle_step=0.125,
    idle_entry=0.03125,
)


def golden(name: str) -> Recording:
    return read_recording(GOLDEN / f"{name}.jsonl")


class FailingExecutor(SimulatedExecutor):
    """Some steps fail, and the worker dies in some others."""

    async def restart(self) -> None:
        await asyncio.sleep(3)

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        error: EngineError | None = None
        if step.step_id % 7 == 3:
            error = StepFailed("by chance")
        if step.step_id % 19 == 4:
            error = WorkerLost("by chance")
        if error is None:
            return super().submit(step)
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.25, future.set_exception, error)
        return future


@pytest.mark.parametrize("name", ["fcfs", "mlfq", "fair", "deadline", "priority"])
def test_a_recording_with_failed_steps_and_lost_workers_is_reproduced(
    name: str, tmp_path: Path
) -> None:
    header = replace(golden(f"{name}_grow").header, depth=2)
    written = [header.line()]

    def write(row: Row) -> None:
        written.append(render(row, str))

    scheduler = header.build(LiveCost(header.cost), EventRecorder(write, header.kv.block_size))
    played = play_all(scheduler, FailingExecutor(TRUE, depth=2), [plain(one) for one in load()])
    assert any("as" not in str(lost.error) for lost in played.lost)
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(written))
    recording = read_recording(path)
    kinds = {field for row in recording.rows for field in ("lost", "failed") if getattr(row, field)}
    assert kinds == {"lost", "failed"}
    assert RecordingVerifier(recording).verify(SLO()).difference is None


def plain(arrival: RecordedRequest) -> Arrival:
    """The same lengths with tokens that are not in the recording."""
    return Arrival(arrival.at, arrival.prompt_len, arrival.output_len)


def test_a_schedule_that_differs_is_reported_with_its_line(tmp_path: Path) -> None:
    written = (GOLDEN / "fcfs_grow.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(written) if '"planned":3' in line)
    row = json.loads(written[at])
    row["entries"][0][2] += 1
    written[at] = json.dumps(row)
    path = tmp_path / "other.jsonl"
    path.write_text("\n".join(written))
    verification = RecordingVerifier(read_recording(path)).verify(SLO())
    assert verification.difference is not None
    assert verification.difference.startswith(f"line {at + 1}: recorded")
    assert verification.figures is None


def test_verification_returns_the_metrics_of_the_recorded_run() -> None:
    recording = golden("fcfs_grow")
    figures = RecordingVerifier(recording).verify(SLO(ttft=5.0)).figures
    assert figures is not None
    finished = [row for row in recording.rows if row.outcome == "finished"]
    assert figures.num_arrived == len(recording.arrivals)
    assert figures.num_finished == len(finished)
    assert figures.output_tokens == sum(row.produced for row in finished)
    assert figures.num_preempted == sum(row.preempted is not None for row in recording.rows)
    assert figures.cached_tokens > 0


def setup(header: RecordingHeader, cost: CostModel) -> Setup:
    size = header.kv.num_blocks * header.kv.block_size
    return Setup("again", header.scheduler, lambda c: policy(header, c), cost, size, 4)


def test_the_cost_model_is_fitted_to_the_recorded_iterations(tmp_path: Path) -> None:
    """The machine's true cost differs from the one in the recording's header."""
    header = replace(golden("fcfs_grow").header, cost=TRUE)
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(lines(header, load())))
    recording = read_recording(path)
    found = recording.cost()
    assert found.idle_step == pytest.approx(0.125, rel=0.02)
    assert found.idle_entry == pytest.approx(0.03125, rel=0.02)
    again = simulate(setup(header, found), recording.arrivals)
    first = RecordingVerifier(recording).verify(SLO()).figures
    assert first is not None
    for measure in ("ttft", "jct"):
        for point in ("mean", "p50"):
            assert again.at(measure, point) == pytest.approx(first.at(measure, point), rel=0.1)


def test_clients_disconnect_in_a_replay_as_they_did_in_the_recording() -> None:
    recording = golden("fcfs_grow")
    left = {
        row.cancelled
        for row in recording.rows
        if row.cancelled is not None and row.reason == "client_gone"
    }
    impatient = [one for one in recording.arrivals if one.patience is not None]
    assert {one.number for one in impatient} == left
    ended: list[tuple[int, str]] = []

    class Ends(EventRecorder):
        def ended(self, request: Request, now: float) -> None:
            ended.append((request.request_id, request.outcome))

    header = recording.header
    simulate(setup(header, header.cost), recording.arrivals, Ends(lambda row: None, 4))
    assert {request for request, outcome in ended if outcome == "cancelled"} == left


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a recording"),
        ("hello\n", "is not a recording"),
        ("[1]\n", "is not a recording"),
        ('{"podway_recording":99}\n', "version 99"),
        ('{"podway_recording":1}\n', "line 1"),
        ("HEADER\n", "contains no requests"),
        ('HEADER\n{"at":0,"arrived":0,"prompt":1,"max_tokens":1}\n{"at":1,"what":2}\n', "line 3"),
        ('HEADER\n{"at":0,"arrived":0,"prompt":1,"max_tokens":1}\n{"at":1,"pl', "line 3"),
    ],
)
def test_an_invalid_recording_is_rejected_with_its_line(
    text: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(text.replace("HEADER", golden("fcfs_grow").header.line()))
    with pytest.raises(BadRecording, match=says):
        read_recording(path)


def test_a_missing_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="cannot read"):
        read_recording(tmp_path / "none.jsonl")


def test_a_recording_may_be_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl.gz"
    path.write_bytes(gzip.compress((GOLDEN / "fair_grow.jsonl").read_bytes()))
    assert read_recording(path).arrivals == golden("fair_grow").arrivals


def test_a_header_omits_unlimited_settings_and_reads_back_equal(tmp_path: Path) -> None:
    header = RecordingHeader(
        "mlfq", PolicySettings(), SchedulerSettings(64), KVShape(10, 4), 1, TRUE
    )
    path = tmp_path / "record.jsonl"
    row: Row = {"at": 0, "arrived": 0, "prompt": 1, "max_tokens": 1}
    path.write_text(header.line() + "\n" + render(row, str))
    assert "Infinity" not in path.read_text()
    assert read_recording(path).header == header


def test_a_header_has_the_size_of_the_kv_cache_beside_its_own_fields(tmp_path: Path) -> None:
    kv = KVShape(10, 4, 8, 6, saves_on_host=True, windows=(None, 8), num_states=3)
    header = RecordingHeader("fcfs", PolicySettings(), SchedulerSettings(64), kv, 1, TRUE)
    row = json.loads(header.line())
    assert (row["num_blocks"], row["num_disk_blocks"], row["windows"]) == (10, 6, [None, 8])
    assert "kv" not in row
    assert "num_store_names" not in row, "it has its default"
    path = tmp_path / "record.jsonl"
    event: Row = {"at": 0, "arrived": 0, "prompt": 1, "max_tokens": 1}
    path.write_text(header.line() + "\n" + render(event, str))
    assert read_recording(path).header == header


def test_a_recording_of_requests_with_images_is_refused(tmp_path: Path) -> None:
    """It says where they are, and nothing of their encoder."""
    header, encoder = golden("fcfs_grow").header, EncoderReport(3, 100, 1, 0, tile=4)
    written = [header.line()]
    recorder = EventRecorder(lambda row: written.append(render(row, str)), header.kv.block_size)
    scheduler = header.build(LiveCost(header.cost), recorder, encoder=encoder)
    image = Media(2, 3, b"one", blank(12, 1, 16), (1, 3, 4))
    for media in ((), (image,)):
        scheduler.add(RequestSpec((1,) * 8, 2, SamplingParams(), media=media), 0.5)
    assert [json.loads(line).get("images") for line in written[1:]] == [None, [[2, 3, "b'one'"]]]
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(written))
    with pytest.raises(BadRecording, match=r"request 1 of the recording .* has images"):
        read_recording(path)
