import json
from pathlib import Path

import pytest

from engine.errors import StartupError, StepFailed
from engine.step import StepId, StepTimes
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.transport.trace import TraceFile
from engine.transport.wire import TraceEvents
from engine.worker_settings import Placement, WorkerSettings
from tests.engine.transport.workers import Command
from tests.fakes import a_step


async def test_each_step_is_a_span_of_the_loop_from_submission_to_result(tmp_path: Path) -> None:
    settings = MultiprocessSettings(2, 1, 2, worker="tests.engine.transport.workers:EchoWorker")
    with TraceFile(tmp_path / "trace.json") as trace:
        executor = MultiprocessExecutor(WorkerSettings(model="echo"), settings, trace=trace)
        await executor.start(lambda what, done, total: None)
        answers = [executor.submit(a_step(1, 10, 20)), executor.submit(a_step(2, Command.RAISE))]
        await answers[0]
        with pytest.raises(StepFailed):
            await answers[1]
        await executor.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in events if event.get("cat") == "step"]
    assert [(span["ph"], span["id"]) for span in spans] == [("b", 1), ("b", 2), ("e", 1), ("e", 2)]
    assert spans[0]["args"] == {"requests": 2, "tokens": 2}
    assert spans[0]["ts"] <= spans[2]["ts"]


def test_each_worker_has_three_threads_of_events(tmp_path: Path) -> None:
    with TraceFile(tmp_path / "trace.json") as trace:
        first, last = Placement(0, 2), Placement(1, 2)
        trace.step_traced(first, TraceEvents(StepId(7), 1.0, StepTimes(None, 1.5, 2.0)))
        trace.step_traced(last, TraceEvents(StepId(7), 1.0, StepTimes(2.25, 2.5, 3.0)))
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"loop", "stage 0 rank 0", "stage 1 rank 0", "control", "data", "compute"}
    runs = [event for event in events if event["ph"] == "X"]
    assert [(run["pid"], run["dur"]) for run in runs] == [(1, 500_000), (2, 500_000)]
    assert runs[1]["args"]["data_at"] - runs[1]["args"]["learned_at"] == 1_250_000
    moments = [(event["pid"], event["name"]) for event in events if event["ph"] == "i"]
    assert moments == [(1, "step 7 learned"), (2, "step 7 learned"), (2, "step 7 arrived")]


def test_a_trace_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot write the trace"):
        TraceFile(tmp_path / "no" / "trace.json")
