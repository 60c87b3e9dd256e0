"""Run one load on the real engine or in virtual time, with the same scheduler and loop."""

import asyncio
import gc
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from engine.control.event_recorder import EventRecorder, RecordingHeader, Row, render
from engine.cost.fit import Sample
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.iteration import ObserverGroup
from engine.research.leaping.run import highest_load
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.figures import SLO, Figures, summarise
from engine.simulated.play import PlayResult, play_all, play_async
from engine.simulated.record import Recorder
from engine.simulated.replay import Recording, read_recording
from engine.simulated.trace import Arrival, at_rate
from engine.step import Step
from examples.benchmarks.real_engine.counted import CountedExecutor, Turns
from examples.benchmarks.real_engine.loads import Call, watch_length
from examples.benchmarks.real_engine.machine import Machine
from gateway.serve.process import tune_collector

NO_SLO = SLO()
CLASSES = 8  # of steps by their predicted seconds, with equally many steps in each


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
    measurement = _Measurement(header, arrivals)
    scheduler = measurement.scheduler
    with _server_gc():
        if isinstance(machine.executor, CountedExecutor):
            machine.executor.begin()
            run = partial(play_all, scheduler, machine.executor, arrivals, watch_length)
            played = await asyncio.to_thread(run)
        else:
            played = await play_async(scheduler, machine.executor, arrivals, watch_length)
    return await measurement.run(played, slo)


async def measure_in_turns(
    machines: Sequence[Machine],
    headers: Sequence[RecordingHeader],
    arrivals: Sequence[Arrival],
    slo: SLO = NO_SLO,
) -> list[Run]:
    """Run the load on these machines in CPU seconds, one step of each in turn, so that all share
    the machine's slow phases."""
    turns = Turns(len(machines))
    measurements = [_Measurement(header, arrivals) for header in headers]

    def play(number: int) -> PlayResult:
        executor = machines[number].executor
        assert isinstance(executor, CountedExecutor), "turns are for CPU seconds"
        with turns.taking(number) as pass_turn:
            executor.begin(pass_turn)
            scheduler = measurements[number].scheduler
            return play_all(scheduler, executor, arrivals, watch_length)

    with _server_gc():
        runs = [asyncio.to_thread(play, number) for number in range(len(machines))]
        played = await asyncio.gather(*runs)
    return [await one.run(found, slo) for one, found in zip(measurements, played, strict=True)]


class _Measurement:
    """A scheduler whose run is recorded."""

    def __init__(self, header: RecordingHeader, arrivals: Sequence[Arrival]) -> None:
        self._header = header
        self._rows: list[Row] = []
        self._recorder = _recorder(arrivals)
        event_recorder = EventRecorder(self._rows.append, header.kv.block_size)
        observer = ObserverGroup(self._recorder, event_recorder)
        self.scheduler = header.build(LiveCost(header.cost), observer)
        self._recorder.watch(self.scheduler)

    async def run(self, played: PlayResult, slo: SLO = NO_SLO) -> Run:
        recording = await asyncio.to_thread(_recording, self._header, self._rows)
        figures = summarise(self._header.policy, played, self._recorder, slo)
        return Run(played, figures, recording)


class Speeds(NamedTuple):
    """Factors on the predicted seconds: of steps of decodes only, which the time between steps
    follows, and of steps with prompts. (Other processes slow memory more than arithmetic.)"""

    decodes: float = 1.0
    prompts: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How the steps of a machine differ from a cost model.

    `bounds` in predicted seconds divide steps into classes; `extras` are the seconds by which steps
    of each class took longer than predicted, in their order and over again. (A stall takes a
    millisecond whatever the step.) `speeds` are for each `period` seconds of the run, the last ones
    for the rest.
    """

    bounds: tuple[float, ...] = ()
    extras: tuple[tuple[float, ...], ...] = ((0.0,),)
    speeds: tuple[Speeds, ...] = (Speeds(),)
    period: float = 1.0


STEADY = Pace()


class _PacedCost:
    """The costs of a machine with such a pace, on the running event loop."""

    def __init__(self, model: CostModel, pace: Pace) -> None:
        self._model = model
        self._extras = [cycle(extras) for extras in pace.extras]
        self._pace = pace

    def step(self, step: Step) -> float:
        seconds = self._model.step(step)
        extra = next(self._extras[bisect_right(self._pace.bounds, seconds)])
        speeds = self._speeds
        speed = speeds.decodes if step.num_tokens == len(step.entries) else speeds.prompts
        return max(seconds / 2, seconds + extra) * speed

    def idle(self, num_entries: int) -> float:
        return self._model.idle(num_entries) * self._speeds.decodes

    @property
    def _speeds(self) -> Speeds:
        number = int(asyncio.get_running_loop().time() / self._pace.period)
        return self._pace.speeds[min(number, len(self._pace.speeds) - 1)]


def spread_of(
    samples: Sequence[Sample], cost: CostModel
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """The `bounds` and `extras` of a pace. The sum of all steps takes what the model predicts."""
    predicted = [sample.predicted(cost) for sample in samples]
    ordered, size = sorted(predicted), -(-len(predicted) // CLASSES)
    bounds = sorted(set(ordered[size::size]) - {ordered[0]})
    speed = sum(sample.seconds for sample in samples) / sum(predicted)
    extras: list[list[float]] = [[] for _ in range(len(bounds) + 1)]
    for sample, seconds in zip(samples, predicted, strict=True):
        extras[bisect_right(bounds, seconds)].append(sample.seconds / speed - seconds)
    return tuple(bounds), tuple(map(tuple, extras))


def pace_of(
    seen: Recording, whole: Recording, cost: CostModel, periods: int, is_late: bool = True
) -> Pace:
    """The spread of the part of a run that a cost model was fitted to, and the speeds in each of
    `periods` parts of the whole run. If `is_late`, they are those that are known when the part
    begins, which are those of the part before."""
    start = whole.rows[0].at
    period = (whole.arrivals[-1].at or 1.0) / periods
    measured, predicted = ([[0.0, 0.0] for _ in range(periods)] for _ in range(2))
    commits = (row for row in whole.rows if row.committed is not None and not row.faults)
    for row, sample in zip(commits, whole.samples(), strict=True):
        number, has_prompts = (
            min(int((row.at - start) / period), periods - 1),
            sample.num_pieces > 0,
        )
        measured[number][has_prompts] += sample.seconds
        predicted[number][has_prompts] += sample.predicted(cost)
    speeds = [Speeds()] if is_late else []
    for seconds, expected in zip(measured, predicted, strict=True):
        ratios = (a / b if b else 1.0 for a, b in zip(seconds, expected, strict=True))
        speeds.append(Speeds(*ratios))
    bounds, extras = spread_of(list(seen.samples()), cost)
    return Pace(bounds, extras, tuple(speeds), period)


def simulate(
    header: RecordingHeader,
    arrivals: Sequence[Arrival],
    slo: SLO = NO_SLO,
    pace: Pace = STEADY,
) -> Run:
    """Run the load in virtual time, with the cost model of `header` and this pace."""
    recorder = _recorder(arrivals)
    scheduler = header.build(LiveCost(header.cost), recorder)
    recorder.watch(scheduler)
    executor = SimulatedExecutor(_PacedCost(header.cost, pace))
    played = play_all(scheduler, executor, arrivals)
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
    """The server's settings of the garbage collector, without full collections: a server does not
    keep the rows of its recording, among which they would take a tenth of a second."""
    before = gc.get_threshold()
    tune_collector()
    gc.set_threshold(*gc.get_threshold()[:2], 1_000_000)
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
