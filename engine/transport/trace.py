"""A Chrome trace, which Perfetto displays, of what every worker did with every step and when.

One process of the trace is the server's event loop, with a span for each step from submission to
result. The others are the workers, each with three threads: *control* marks when the worker
received a step, *data* when its hidden states arrived, and *compute* spans the run of its layers.
All times are this machine's monotonic clock, so workers on other machines appear shifted.
"""

import json
import time
from pathlib import Path
from typing import Self

from engine.errors import StartupError
from engine.step import Step, StepId
from engine.transport.wire import TraceEvents
from engine.worker_settings import Placement

LOOP = 0  # process of the trace; workers follow by their index
CONTROL, DATA, COMPUTE = 1, 2, 3  # threads of a worker
THREADS = {CONTROL: "control", DATA: "data", COMPUTE: "compute"}


class TraceFile:
    """Writes events as they happen; the file is readable at any time, and `close` completes it."""

    def __init__(self, path: Path) -> None:
        """Raises `StartupError` if the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise StartupError(f"cannot write the trace {path}: {error.strerror}") from error
        self.origin = time.monotonic()
        self._named: set[int] = set()
        self._file.write("[")
        self._write({"name": "process_name", "ph": "M", "pid": LOOP, "args": {"name": "loop"}})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submitted(self, step: Step) -> None:
        """The step has been sent to all workers."""
        facts = {"requests": len(step.entries), "tokens": step.num_tokens}
        self._span("b", step.step_id, facts)

    def finished(self, step_id: StepId) -> None:
        """The result or failure of the step has arrived."""
        self._span("e", step_id, {})

    def step_traced(self, placement: Placement, traced: TraceEvents) -> None:
        """A worker has finished a step and reports its times."""
        worker, step, times = 1 + placement.index, f"step {traced.step_id}", traced.times
        if worker not in self._named:
            self._name(worker, str(placement))
        facts = {"step": traced.step_id, "learned_at": self._micros(traced.learned_at)}
        self._moment(worker, CONTROL, f"{step} learned", traced.learned_at)
        if times.data_at is not None:
            facts["data_at"] = self._micros(times.data_at)
            self._moment(worker, DATA, f"{step} arrived", times.data_at)
        if times.idle:
            facts["idle"] = round(times.idle * 1e6)
        began, ended = self._micros(times.began_at), self._micros(times.ended_at)
        place = {"ph": "X", "pid": worker, "tid": COMPUTE, "ts": began, "dur": ended - began}
        self._write({"name": step, "args": facts, **place})

    def close(self) -> None:
        """Idempotent."""
        if not self._file.closed:
            self._file.seek(self._file.tell() - len(",\n"))
            self._file.write("\n]\n")
            self._file.close()

    def _span(self, phase: str, step_id: StepId, facts: dict[str, int]) -> None:
        place = {"ph": phase, "cat": "step", "id": step_id, "pid": LOOP, "tid": CONTROL}
        now = self._micros(time.monotonic())
        self._write({"name": f"step {step_id}", "args": facts, "ts": now, **place})

    def _moment(self, worker: int, thread: int, name: str, at: float) -> None:
        place = {"ph": "i", "s": "t", "pid": worker, "tid": thread, "ts": self._micros(at)}
        self._write({"name": name, **place})

    def _name(self, worker: int, name: str) -> None:
        self._named.add(worker)
        place = {"ph": "M", "pid": worker}
        self._write({"name": "process_name", "args": {"name": name}, **place})
        for thread, name in THREADS.items():
            self._write({"name": "thread_name", "tid": thread, "args": {"name": name}, **place})

    def _micros(self, at: float) -> int:
        return round((at - self.origin) * 1e6)

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(json.dumps(event) + ",\n")
