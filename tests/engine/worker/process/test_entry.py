"""The entry point of a worker, over a socket pair; in this process where that is enough."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from engine.errors import WorkerLost
from engine.media import ImagePixels
from engine.step import LAST_TOKEN, StepId, StepResult
from engine.transport.wire import (
    FrameReader,
    FromWorker,
    Goodbye,
    LoadFailed,
    LoadProgress,
    LoadWorker,
    RunStep,
    SendPixels,
    StepFailure,
    StepRan,
    ToWorker,
    WireError,
    WorkerLoaded,
    frame,
    read_from_worker,
)
from engine.worker.process import entry
from engine.worker.process.results import MAX_LINE_LEN, one_line
from engine.worker_settings import WorkerSettings
from tests.engine.transport.workers import REPORT, Command, EchoWorker
from tests.fakes import a_step

ECHO = "tests.engine.transport.workers:EchoWorker"
LOAD = LoadWorker(WorkerSettings(model="echo"))
LOADING = [LoadProgress("weights", 0, 2), LoadProgress("weights", 2, 2), WorkerLoaded(REPORT)]


@dataclass
class Line:
    """Both ends of a socket pair; the worker's end blocks."""

    ours: socket.socket
    theirs: socket.socket
    frames: FrameReader = field(default_factory=FrameReader)

    def send(self, *messages: ToWorker) -> None:
        for message in messages:
            self.ours.sendall(frame(message))

    def serve(self) -> int:
        return entry.serve(entry.Parent(self.theirs), ECHO)

    def received(self) -> list[FromWorker]:
        """All that the worker has sent up to now."""
        payloads = self.frames.feed(self.ours.recv(1 << 20))
        return [read_from_worker(payload) for payload in payloads]


@pytest.fixture
def line() -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Line(ours, theirs)


def test_a_worker_sends_progress_then_its_report_then_results_in_order(line: Line) -> None:
    line.send(
        LOAD, RunStep(a_step(1, 10)), RunStep(a_step(2, Command.RAISE)), RunStep(a_step(3, 30, 40))
    )
    line.send(Goodbye())
    assert line.serve() == 0
    assert line.received() == [
        *LOADING,
        StepRan(StepResult(StepId(1), (11,), 0.0)),
        StepFailure(StepId(2), "ValueError: a step that raises"),
        StepRan(StepResult(StepId(3), (31, 41), 0.0)),
    ]


def test_steps_are_received_beside_others_once_one_was_planned_ahead(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[StepId] = []  # in the thread that receives
    monkeypatch.setattr(EchoWorker, "learn", lambda _, step: prepared.append(step.step_id))
    line.send(LOAD, RunStep(a_step(1, 10)), RunStep(a_step(2, LAST_TOKEN)))
    line.send(RunStep(a_step(3, 30)), RunStep(a_step(4, 40)), Goodbye())
    assert line.serve() == 0
    assert prepared == [3, 4]
    tokens = [message.result.tokens for message in line.received()[len(LOADING) :]]  # type: ignore[union-attr]
    assert tokens == [(11,), (LAST_TOKEN + 1,), (31,), (41,)]


def test_steps_are_received_beside_others_once_pixels_have_come(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[StepId] = []  # in the thread that receives
    pieces: list[ImagePixels] = []
    monkeypatch.setattr(EchoWorker, "learn", lambda _, step: prepared.append(step.step_id))
    monkeypatch.setattr(
        EchoWorker, "put_pixels", lambda _, piece: pieces.append(piece), raising=False
    )
    pixels = [ImagePixels(1, 4 * at, bytes(4), (8,), (1, 1, 2)) for at in range(2)]
    line.send(LOAD, RunStep(a_step(1, 10)), SendPixels(pixels[0]))
    line.send(RunStep(a_step(2, 20)), SendPixels(pixels[1]), RunStep(a_step(3, 30)), Goodbye())
    assert line.serve() == 0
    assert prepared == [2, 3]
    assert pieces == pixels
    tokens = [message.result.tokens for message in line.received()[len(LOADING) :]]  # type: ignore[union-attr]
    assert tokens == [(11,), (21,), (31,)]


def test_a_worker_gives_the_code_of_libraries_back_once_it_has_loaded(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_before: list[list[FromWorker]] = []
    monkeypatch.setattr(entry, "drop_library_pages", lambda: sent_before.append(line.received()))
    line.send(LOAD, RunStep(a_step(1, 10)), Goodbye())
    assert line.serve() == 0
    assert sent_before == [LOADING]


def test_a_worker_warms_up_once_it_has_sent_its_report_and_nothing_comes(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_before: list[list[FromWorker]] = []

    def warm_up(_: EchoWorker) -> None:
        sent_before.append(line.received())
        line.send(Goodbye())

    monkeypatch.setattr(EchoWorker, "warm_up", warm_up)
    monkeypatch.setattr(entry, "IDLE_SECONDS", 0.0)
    line.send(LOAD)
    assert line.serve() == 0
    assert sent_before == [LOADING]


def test_a_step_that_waits_is_run_without_a_warm_up(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("check", "warm_up"):
        monkeypatch.setattr(EchoWorker, name, lambda _, name=name: called.append(name))
    line.send(LOAD, RunStep(a_step(1, 10)), Goodbye())
    assert line.serve() == 0
    assert called == ["check"]


@pytest.mark.parametrize("before", [[], [LOAD], [LOAD, RunStep(a_step(1, 10))]])
def test_a_worker_ends_when_its_parent_hangs_up(line: Line, before: list[ToWorker]) -> None:
    line.send(*before)
    line.ours.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        line.serve()


def test_loading_ends_when_the_parent_has_closed_the_connection(line: Line) -> None:
    line.send(LOAD)
    line.ours.close()
    with pytest.raises(ConnectionError):
        line.serve()


def test_the_settings_come_first(line: Line) -> None:
    line.send(RunStep(a_step(1, 10)))
    with pytest.raises(WireError, match="RunStep came before the settings"):
        line.serve()


def test_a_startup_error_is_sent_as_one_short_line(line: Line) -> None:
    line.send(LoadWorker(WorkerSettings(model="fail")))
    assert line.serve() == 1
    assert line.received()[-1] == LoadFailed("layers: no such thing")
    assert len(one_line("x " * 1000)) == MAX_LINE_LEN


def test_a_worker_whose_device_is_lost_sends_no_result(line: Line) -> None:
    line.send(LOAD, RunStep(a_step(1, Command.LOSE)), RunStep(a_step(2, 20)))
    with pytest.raises(WorkerLost, match="the device is unusable"):
        line.serve()
    assert line.received() == LOADING


def process_of(theirs: socket.socket, parent: int) -> subprocess.Popen[bytes]:
    """A worker process at that end, which takes `parent` for its parent."""
    fd = theirs.fileno()
    arguments = ["--socket", str(fd), "--parent", str(parent), ECHO]
    return subprocess.Popen(
        [sys.executable, "-m", "engine.worker.process.entry", *arguments], pass_fds=(fd,)
    )


def test_the_process_exits_with_0_when_its_parent_hangs_up(line: Line) -> None:
    line.ours.shutdown(socket.SHUT_WR)
    with process_of(line.theirs, os.getpid()) as process:
        assert process.wait(60) == 0


def test_the_process_exits_with_1_after_an_unknown_message(line: Line) -> None:
    line.send(Goodbye())
    with process_of(line.theirs, os.getpid()) as process:
        assert process.wait(60) == 1


def test_the_process_does_not_stay_with_a_parent_that_is_not_its_own(line: Line) -> None:
    """As when the parent dies before the child can ask to be notified."""
    with process_of(line.theirs, os.getpid() + 1) as process:
        assert process.wait(60) == 0


def test_the_process_obeys_sigterm_while_it_loads(line: Line) -> None:
    line.send(LoadWorker(WorkerSettings(model="hang")))
    with process_of(line.theirs, os.getpid()) as process:
        assert line.received() == LOADING[:1]
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
