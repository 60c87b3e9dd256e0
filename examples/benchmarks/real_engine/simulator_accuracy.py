"""The simulator beside the real engine: predictions, measurements and errors.

A small model on this machine's CPU, requests of the Azure conversation trace with their lengths
divided, Poisson arrivals. Each load is run on the engine once, and simulated with the same arrivals
(paired) under three cost models: the one that a server measures when it starts, one fitted to an
earlier run with other arrivals, and one fitted to the first fifth of the same run, as a server
refines it while it serves; the rest of the run is compared. The third is also used with the pace
of the machine: steps have the spread of steps of their size in that fifth, and the speeds of
decodes and of steps with prompts are estimated again for each twentieth of the run from the one
before it, as a server follows a machine that is used by others. Last come the speeds of each
twentieth itself, which are known afterwards only.

Errors have 95 % intervals from the means of batches of consecutive requests. From 80 % of capacity
on, latencies say more about the load than about the simulator, so there the error is given in load:
the change of the arrival rate at which the simulation has the measured mean JCT. Writes README.md,
figures.json and errors.png. An earlier figures.json that is kept as run_NAME.json has a table of
its own on the page.

    python -m examples.benchmarks.real_engine.simulator_accuracy
        [--requests 5000] [--loads 0.5 0.7 0.9] [--size medium] [--out DIR]

The default takes about five minutes of a quiet machine for the engine, and then some minutes for
the simulations. With `--clock cpu` other load may run.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

import numpy

from engine.control.event_recorder import RecordingHeader
from engine.cost.model import CostModel
from engine.request import RequestSpec
from engine.simulated.play import Outcome
from engine.simulated.replay import Recording
from engine.simulated.trace import at_rate, read_trace
from examples.benchmarks.real_engine import loads
from examples.benchmarks.real_engine.accuracy_page import BEST, KNOWN, draw, earlier, report, table
from examples.benchmarks.real_engine.machine import (
    SIZES,
    Machine,
    circumstances,
    clock_of,
    machine,
    make_model,
)
from examples.benchmarks.real_engine.running import STEADY, Pace, Run, measure, pace_of, simulate
from examples.benchmarks.written import write_files

OUT = Path(__file__).parents[1] / "results" / "accuracy"
MEASURES: dict[str, Callable[[Outcome], float]] = {
    "TTFT": lambda one: 1e3 * one.ttft,
    "ITL": lambda one: 1e3 * (one.tpot or 0.0),
    "JCT": lambda one: 1e3 * one.jct,
}
POINTS = {"p50": 50, "p99": 99}
DIVISOR = 16  # of the trace's lengths
BATCHES = 10  # of consecutive requests, for intervals
T_95 = 2.262  # Student's t of 9 degrees of freedom, 97.5 %
FLOOD = 100_000.0  # requests/s, more than any engine here can serve
HIGH_LOAD = 0.8  # from which on the error is given in load
PERIODS = 20  # of a run, after each of which its speed is estimated again
SEEN = 5  # one part in so many of a run is for the fit; the rest is compared
Errors = dict[str, dict[str, float]]  # measured, predicted, error and half width, by quantity


@dataclass(frozen=True, slots=True)
class ReadyCall(loads.Call):
    """A call whose prompt was made before the run, so that making it takes none of its time."""

    ready: RequestSpec | None = None

    def spec(self, index: int) -> RequestSpec:
        assert self.ready is not None, "made by `calls_of`"
        return self.ready


def calls_of(count: int, seed: int, divisor: int = DIVISOR) -> list[ReadyCall]:
    """Lengths of the trace in random order, and Poisson arrivals at one request per second."""
    random, at, calls = Random(seed), 0.0, []
    sample = read_trace(loads.AZURE)
    for index in range(count):
        one = random.choice(sample)
        at += random.expovariate(1.0)
        lengths = max(1, one.prompt_len // divisor), max(1, one.output_len // divisor)
        spec = loads.Call(at, *lengths).spec((seed << 32) + index)
        calls.append(ReadyCall(at, *lengths, ready=spec))
    return calls


def faster(calls: Sequence[ReadyCall], rate: float) -> list[ReadyCall]:
    return [replace(c, at=m.at) for c, m in zip(calls, at_rate(calls, rate), strict=True)]


def compared(real: Run, simulated: Run, first: int) -> Errors:
    """Each latency's error, with an interval from batches, over the requests from number `first`
    on; and that of the throughput, over all."""
    found: Errors = {}
    for name, of in MEASURES.items():
        pair = [
            numpy.array([of(one) for one in run.played.outcomes[first:]])
            for run in (real, simulated)
        ]
        for point, percent in POINTS.items():
            measured, predicted = (float(numpy.percentile(values, percent)) for values in pair)
            batches = zip(*(numpy.array_split(values, BATCHES) for values in pair), strict=True)
            errors = [
                float(numpy.percentile(b, percent) / numpy.percentile(a, percent)) - 1.0
                for a, b in batches
            ]
            found[f"{name} {point}"] = {
                "measured": measured,
                "predicted": predicted,
                "error": predicted / measured - 1.0,
                "interval": T_95 * stdev(errors) / BATCHES**0.5,
            }
    rates = real.figures.output_rate, simulated.figures.output_rate
    found["throughput"] = {
        "measured": rates[0],
        "predicted": rates[1],
        "error": rates[1] / rates[0] - 1.0,
        "interval": 0.0,
    }
    return found


def load_error(
    header: RecordingHeader, calls: Sequence[ReadyCall], rate: float, jct: float, pace: Pace
) -> float:
    """The relative change of the rate at which the simulation has this mean JCT."""
    low, high = 0.5 * rate, 1.5 * rate
    for _ in range(9):
        middle = (low + high) / 2
        run = simulate(header, faster(calls, middle), pace=pace)
        is_slower = mean(one.jct for one in run.played.outcomes) > jct
        low, high = (low, middle) if is_slower else (middle, high)
    return low / rate - 1.0


def step_errors(recording: Recording, cost: CostModel) -> dict[str, float]:
    """The error of the cost model itself over the steps of a run: of their sum, and the median."""
    samples = list(recording.samples())
    predicted = [sample.predicted(cost) for sample in samples]
    errors = [abs(p / s.seconds - 1.0) for p, s in zip(predicted, samples, strict=True)]
    total = sum(predicted) / sum(sample.seconds for sample in samples) - 1.0
    return {"sum": total, "median": median(errors)}


def first_part(recording: Recording) -> Recording:
    """The rows up to the arrival of one part in `SEEN` of the requests."""
    last = len(recording.arrivals) // SEEN
    stop = next(at for at, row in enumerate(recording.rows) if row.arrived == last)
    return replace(recording, rows=recording.rows[:stop])


@dataclass(frozen=True, slots=True)
class Measured:
    """A load on the real engine."""

    load: float
    rate: float  # requests/s
    calls: list[ReadyCall]
    run: Run


async def measured_at(on: Machine, load: float, most: float, count: int) -> Measured:
    calls = faster(calls_of(count, seed=round(1000 * load)), load * most)
    return Measured(load, load * most, calls, await measure(on, on.header("fcfs"), calls))


async def row_of(on: Machine, costs: dict[str, CostModel], one: Measured) -> dict[str, object]:
    """The errors of the simulation under each cost model."""
    load, rate, calls, real = one.load, one.rate, one.calls, one.run
    assert real.recording is not None, "every real run is recorded"
    count, seen = len(calls), await asyncio.to_thread(first_part, real.recording)
    costs = costs | dict.fromkeys(("first fifth", BEST, KNOWN), seen.cost())
    row: dict[str, object] = {"load": load, "rate": rate, "requests": count, "errors": {}}
    found: dict[str, object] = {}
    for name, cost in costs.items():
        header, pace = on.header("fcfs", cost), STEADY
        if name in (BEST, KNOWN):
            pace = pace_of(seen, real.recording, cost, PERIODS, is_late=name == BEST)
        simulated = await asyncio.to_thread(simulate, header, calls, pace=pace)
        errors: dict[str, object] = {"steps": step_errors(real.recording, cost)}
        if load >= HIGH_LOAD:
            jct = mean(one.jct for one in real.played.outcomes)
            errors["load"] = await asyncio.to_thread(load_error, header, calls, rate, jct, pace)
        else:
            errors["quantities"] = compared(real, simulated, count // SEEN)
        found[name] = errors
    return row | {"errors": found}


async def compare(on: Machine, args: argparse.Namespace) -> dict[str, object]:
    """A row for each load, and the throughput under saturation."""
    few = max(100, args.requests // 5)
    await measure(on, on.header("fcfs"), faster(calls_of(few, seed=5), FLOOD))  # warms up
    flood = faster(calls_of(few, seed=1), FLOOD)
    flooded = await measure(on, on.header("fcfs"), flood)
    most = flooded.figures.throughput
    earlier = await measure(on, on.header("fcfs"), faster(calls_of(few, seed=2), 0.6 * most))
    assert earlier.recording is not None, "every real run is recorded"
    costs = {"at the start": on.cost, "earlier run": earlier.recording.cost()}
    saturated = {"measured": most}
    for name, cost in costs.items():
        run = await asyncio.to_thread(simulate, on.header("fcfs", cost), flood)
        saturated[name] = run.figures.throughput
    runs = [await measured_at(on, load, most, args.requests) for load in args.loads]
    where = f"{circumstances()}. {clock_of(on.is_counted)}"
    print(f"{where} The engine has run; the simulations follow.", flush=True)
    rows = []
    for one in runs:
        rows.append(await row_of(on, costs, one))
        print(table(rows[-1:]), flush=True)
    return {
        "size": args.size,
        "model": (
            f"{on.report.num_parameters / 1e6:.1f} M parameters, {args.threads} compute thread(s), "
            "batches of 8 requests or 256 tokens"
        ),
        "where": where,
        "divisor": DIVISOR,
        "batches": BATCHES,
        "capacity": most,
        "rows": rows,
        "saturated": saturated,
    }


async def run_all(model: Path, args: argparse.Namespace) -> None:
    async with machine(model, args.threads, args.clock == "cpu") as on:
        found = await compare(on, args)
    page = report(found, earlier(args.out))
    write_files(args.out, {"README.md": page, "figures.json": found})
    draw(found, args.out / "errors.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--size", choices=SIZES, default="medium", help="of the model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", SIZES[args.size])
        asyncio.run(run_all(model, args))


if __name__ == "__main__":
    main()
