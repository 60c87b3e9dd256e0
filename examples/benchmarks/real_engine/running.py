"""Run one load on the real engine or in virtual time, with the same scheduler and loop."""

import asyncio
import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine.control.event_recorder import EventRecorder, RecordingHeader, Row, render
from engine.cost.live import LiveCost
from engine.events import ObserverGroup
from engine.simulated.capacity import highest_load
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.figures import SLO, Figures, summarise
from engine.simulated.play import PlayResult, play_all, play_async
from engine.simulated.record import Recorder
from engine.simulated.replay import Recording, read_recording
from engine.simulated.trace import Arrival, at_rate
from examples.benchmarks.real_engine.loads import Call
from examples.benchmarks.real_engine.machine import Machine
from gateway.serve.server import tune_collector

NO_SLO = SLO()


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of every request, the figures, and the recording of a measured run."""

    played: PlayResult
    figures: Figures
    recording: Recording | None = None


async def measure(
    machine: Machine, header: RecordingHeader, arrivals: Sequence[Arrival], slo: SLO = NO_SLO
) -> Run:
    """Run the load on the worker, in real time or in CPU seconds."""
    rows: list[Row] = []
    recorder = _recorder(arrivals)
    event_recorder = EventRecorder(rows.append, header.block_size)
    scheduler = header.build(LiveCost(header.cost), ObserverGroup(recorder, event_recorder))
    recorder.watch(scheduler)
    with _server_gc():
        if machine.is_counted:
            played = await asyncio.to_thread(play_all, scheduler, machine.executor, arrivals)
        else:
            played = await play_async(scheduler, machine.executor, arrivals)
    recording = await asyncio.to_thread(_recording, header, rows)
    return Run(played, summarise(header.policy, played, recorder, slo), recording)


def simulate(header: RecordingHeader, arrivals: Sequence[Arrival], slo: SLO = NO_SLO) -> Run:
    """Run the load in virtual time, with the cost model of `header`."""
    recorder = _recorder(arrivals)
    scheduler = header.build(LiveCost(header.cost), recorder)
    recorder.watch(scheduler)
    played = play_all(scheduler, SimulatedExecutor(header.cost), arrivals)
    return Run(played, summarise(header.policy, played, recorder, slo))


async def capacity(on: Machine, calls: Sequence[Call]) -> float:
    """The simulated capacity under fcfs in requests/s: the highest rate at which the last request
    ends within 1.1 times the time of the last arrival."""

    def holds(rate: float) -> bool:
        moved = [replace(c, at=m.at) for c, m in zip(calls, at_rate(calls, rate), strict=True)]
        run = simulate(on.header("fcfs"), moved)
        return run.figures.seconds <= 1.1 * moved[-1].at

    return await asyncio.to_thread(highest_load, holds, 4.0, 0.05)


def _recorder(arrivals: Sequence[Arrival]) -> Recorder:
    return Recorder(period=arrivals[-1].at / 200 or 1.0)


@contextmanager
def _server_gc() -> Iterator[None]:
    """The garbage collector with the server's settings."""
    before = gc.get_threshold()
    tune_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def _recording(header: RecordingHeader, rows: Sequence[Row]) -> Recording:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recording.jsonl"
        lines = (render(row, str) for row in rows)
        path.write_text("\n".join((header.line(), *lines)) + "\n")
        return read_recording(path)
