"""One load on the real engine or in virtual time: the same scheduler, loop and callers in both."""

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
    """How everybody fared, the figures of it, and what was recorded, if it was."""

    played: PlayResult
    figures: Figures
    recording: Recording | None = None


async def really(
    machine: Machine, terms: RecordingHeader, arrivals: Sequence[Arrival], slo: SLO = NO_SLO
) -> Run:
    """On the worker, in real time or in CPU seconds."""
    rows: list[Row] = []
    recorder = _recorder(arrivals)
    scribe = EventRecorder(rows.append, terms.block_size)
    scheduler = terms.build(LiveCost(terms.cost), ObserverGroup(recorder, scribe))
    recorder.watch(scheduler)
    with _calm():
        if machine.is_counted:
            played = await asyncio.to_thread(play_all, scheduler, machine.executor, arrivals)
        else:
            played = await play_async(scheduler, machine.executor, arrivals)
    recording = await asyncio.to_thread(_recording, terms, rows)
    return Run(played, summarise(terms.policy, played, recorder, slo), recording)


def virtually(terms: RecordingHeader, arrivals: Sequence[Arrival], slo: SLO = NO_SLO) -> Run:
    """In virtual time, at the cost that the terms name."""
    recorder = _recorder(arrivals)
    scheduler = terms.build(LiveCost(terms.cost), recorder)
    recorder.watch(scheduler)
    played = play_all(scheduler, SimulatedExecutor(terms.cost), arrivals)
    return Run(played, summarise(terms.policy, played, recorder, slo))


async def capacity(on: Machine, calls: Sequence[Call]) -> float:
    """Requests a second that first come, first served carries by simulation, the last request
    being answered within a tenth of the time after the last arrival."""

    def holds(rate: float) -> bool:
        moved = [replace(c, at=m.at) for c, m in zip(calls, at_rate(calls, rate), strict=True)]
        run = virtually(on.terms("fcfs"), moved)
        return run.figures.seconds <= 1.1 * moved[-1].at

    return await asyncio.to_thread(highest_load, holds, 4.0, 0.05)


def _recorder(arrivals: Sequence[Arrival]) -> Recorder:
    return Recorder(period=arrivals[-1].at / 200 or 1.0)


@contextmanager
def _calm() -> Iterator[None]:
    """The garbage collector as a server has it."""
    before = gc.get_threshold()
    tune_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def _recording(terms: RecordingHeader, rows: Sequence[Row]) -> Recording:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "recording.jsonl"
        lines = (render(row, str) for row in rows)
        path.write_text("\n".join((terms.line(), *lines)) + "\n")
        return read_recording(path)
