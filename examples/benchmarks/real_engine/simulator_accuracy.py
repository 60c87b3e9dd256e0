"""The simulator beside the real engine: predictions, measurements and errors.

A small model on this machine's CPU, requests of the Azure conversation trace with their lengths
divided, Poisson arrivals. Each load is run on the engine once, and simulated with the same
arrivals (paired) under two cost models: the one that a server measures when it starts, and one
fitted to the recording of an earlier run with other arrivals. Errors have 95 % intervals from the
means of batches of consecutive requests. Above 80 % of capacity latencies say more about the load
than about the simulator, so there the error is given in load: the change of the arrival rate at
which the simulation has the measured mean JCT. Writes README.md and figures.json.

    python -m examples.benchmarks.real_engine.simulator_accuracy
        [--requests 5000] [--loads 0.5 0.7] [--out DIR]
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import numpy

from engine.cost.model import CostModel
from engine.simulated.play import Outcome
from engine.simulated.trace import at_rate, read_trace
from examples.benchmarks.real_engine import loads
from examples.benchmarks.real_engine.machine import (
    SMALL,
    TINY,
    Machine,
    circumstances,
    clock_of,
    machine,
    make_model,
)
from examples.benchmarks.real_engine.running import Run, capacity, measure, simulate

OUT = Path(__file__).parents[1] / "results" / "accuracy"
MEASURES: dict[str, Callable[[Outcome], float]] = {
    "TTFT": lambda one: 1e3 * one.ttft,
    "ITL": lambda one: 1e3 * (one.tpot or 0.0),
    "JCT": lambda one: 1e3 * one.jct,
}
POINTS = {"p50": 50, "p99": 99}
GOALS = {"p50": 0.05, "p99": 0.10, "throughput": 0.02}
NAMES = ("at the start", "from a recording")  # of the cost models
DIVISOR = 16  # of the trace's lengths
BATCHES = 10  # of consecutive requests, for intervals
T_95 = 2.262  # Student's t of 9 degrees of freedom, 97.5 %
SATURATED = 4.0  # times the simulated capacity
Error = dict[str, float]  # measured, predicted, error and the half width of its interval


def calls_of(count: int, seed: int, divisor: int = DIVISOR) -> list[loads.Call]:
    """Lengths of the trace in random order, and Poisson arrivals at one request per second."""
    random, at, calls = Random(seed), 0.0, []
    sample = read_trace(loads.AZURE)
    for _ in range(count):
        one = random.choice(sample)
        at += random.expovariate(1.0)
        lengths = max(1, one.prompt_len // divisor), max(1, one.output_len // divisor)
        calls.append(loads.Call(at, *lengths))
    return calls


def faster(calls: Sequence[loads.Call], rate: float) -> list[loads.Call]:
    return [replace(c, at=m.at) for c, m in zip(calls, at_rate(calls, rate), strict=True)]


def compared(real: Run, simulated: Run) -> dict[str, Error]:
    """Each latency's error, with an interval from batches, and that of the throughput."""
    found: dict[str, Error] = {}
    for name, of in MEASURES.items():
        pair = [numpy.array([of(one) for one in run.played.outcomes]) for run in (real, simulated)]
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


def load_equivalent(
    on: Machine, cost: CostModel, calls: Sequence[loads.Call], rate: float, jct: float
) -> float:
    """The relative change of the rate at which the simulation has this mean JCT."""
    low, high = 0.5 * rate, 1.5 * rate
    for _ in range(8):
        middle = (low + high) / 2
        run = simulate(on.header("fcfs", cost), faster(calls, middle))
        is_slower = mean(one.jct for one in run.played.outcomes) > jct
        low, high = (low, middle) if is_slower else (middle, high)
    return low / rate - 1.0


async def compare(on: Machine, args: argparse.Namespace) -> dict[str, object]:
    """The cost models, a row for each load, and the throughput under saturation."""
    few = max(100, args.requests // 5)
    most = await capacity(on, calls_of(few, seed=1))
    other = await measure(on, on.header("fcfs"), faster(calls_of(few, seed=2), 0.6 * most))
    assert other.recording is not None, "every real run is recorded"
    costs = dict(zip(NAMES, (on.cost, other.recording.cost()), strict=True))
    rows = []
    for load in args.loads:
        count = min(args.requests, int(args.seconds * load * most))
        calls = faster(calls_of(count, seed=3), load * most)
        real = await measure(on, on.header("fcfs"), calls)
        row: dict[str, object] = {"load": load, "rate": load * most, "requests": len(calls)}
        for name, cost in costs.items():
            simulated = await asyncio.to_thread(simulate, on.header("fcfs", cost), calls)
            row[name] = compared(real, simulated)
            if args.equivalent:
                part = calls[:few]
                jct = mean(one.jct for one in real.played.outcomes[:few])
                row[f"load error {name}"] = await asyncio.to_thread(
                    load_equivalent, on, cost, part, load * most, jct
                )
        rows.append(row)
        print(table([row]), flush=True)
    flood = faster(calls_of(few, seed=4), SATURATED * most)
    real = await measure(on, on.header("fcfs"), flood)
    saturated = {"measured": real.figures.throughput}
    for name, cost in costs.items():
        run = await asyncio.to_thread(simulate, on.header("fcfs", cost), flood)
        saturated[name] = run.figures.throughput
    error = other.recording.cost_error()
    assert error is not None, "a run has iterations"
    return {
        "model": (
            f"{on.report.num_parameters / 1e6:.1f} M parameters, {args.threads} compute thread(s), "
            "batches of 8 requests or 256 tokens"
        ),
        "where": f"{circumstances()}. {clock_of(on.is_counted)}",
        "capacity": most,
        "rows": rows,
        "saturated": saturated,
        "cost_error": {"median": error.median, "p90": error.p90, "iterations": error.num_steps},
    }


def table(rows: Sequence[dict[str, object]]) -> str:
    """A line for each load and quantity: measured, and the errors of both predictions."""
    lines = ["| load | | measured | error, cost at the start | from a recording | goal |"]
    lines.append("|" + "---|" * 6)
    for row in rows:
        errors = [row[name] for name in NAMES]
        assert all(isinstance(each, dict) for each in errors)
        for quantity in errors[0]:  # type: ignore[attr-defined]
            goal = GOALS[quantity.split()[-1]]
            unit = " tokens/s" if quantity == "throughput" else " ms"
            found = [each[quantity] for each in errors]  # type: ignore[index]
            cells = []
            for one in found:
                interval = f" ± {one['interval']:.1%}" if one["interval"] else ""
                cells.append(f"{one['error']:+.1%}{interval}")
            measured = f"{found[0]['measured']:.4g}{unit}"
            cells = [f"{row['load']:.0%}", quantity, measured, *cells, f"{goal:.0%}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(found: dict[str, object]) -> str:
    """The page, from what `figures.json` has."""
    rows, saturated, error = found["rows"], found["saturated"], found["cost_error"]
    assert isinstance(rows, list)
    assert isinstance(saturated, dict)
    assert isinstance(error, dict)
    counts = ", ".join(f"{row['requests']:,}" for row in rows)
    ratios = [saturated[name] / saturated["measured"] - 1.0 for name in NAMES]
    return f"""# Predicted and measured

`python -m examples.benchmarks.real_engine.simulator_accuracy`: the engine of the server, requests
from the same process without HTTP; a Llama with random weights, {found["model"]};
{counts} requests at the loads, lengths of the Azure conversation trace divided
by {DIVISOR}, Poisson arrivals, the same ones in engine and simulation. Loads are shares of the
simulated capacity under fcfs ({found["capacity"]:.4g} requests/s). {found["where"]}

ITL is that of a request (TPOT). Intervals (95 %) are from {BATCHES} batches of consecutive
requests. *At the start*: the cost model that a server measures before it is ready. *From a
recording*: fitted to the iterations of an earlier run at 60 % load with other arrivals, and to the
event loop's time between them; its own error is {error["median"]:.1%} (median) and
{error["p90"]:.1%} (p90) over {error["iterations"]:,} iterations.

{table(rows)}

{misses(rows)}

{load_errors(rows)}

With {SATURATED:g} times the capacity offered the engine finishes {saturated["measured"]:.4g}
requests/s; the simulation is {ratios[0]:+.1%} (cost at the start) and {ratios[1]:+.1%} (from a
recording) off.

What the simulation leaves out: HTTP, tokenizing and text, the compile time of grammars, lookahead
(off here), and other processes. The time of the event loop between two steps is part of the fitted
model (`idle_step`, `idle_entry`), tokenizing and masks are not.
"""


def load_errors(rows: Sequence[dict[str, object]]) -> str:
    """The errors in load of the rows that have them, in a sentence."""
    found = [
        f"{row['load']:.0%} load: {row[f'load error {NAMES[0]}']:+.1%} (cost at the start), "
        f"{row[f'load error {NAMES[1]}']:+.1%} (from a recording)"
        for row in rows
        if f"load error {NAMES[0]}" in row
    ]
    if not found:
        return ""
    text = "Change of the arrival rate at which the simulation has the measured mean JCT: "
    return text + "; ".join(found) + "."


def misses(rows: Sequence[dict[str, object]]) -> str:
    """The quantities that miss their goal with the recorded cost model, in a sentence."""
    missed = []
    for row in rows:
        errors = row["from a recording"]
        assert isinstance(errors, dict)
        missed += [
            f"{quantity} at {row['load']:.0%} load ({one['error']:+.1%})"
            for quantity, one in errors.items()
            if abs(one["error"]) > GOALS[quantity.split()[-1]]
        ]
    if not missed:
        return "With the cost model from a recording every quantity is within its goal."
    return "With the cost model from a recording these miss their goal: " + ", ".join(missed) + "."


async def run_all(model: Path, args: argparse.Namespace) -> None:
    async with machine(model, args.threads, args.clock == "cpu") as on:
        found = await compare(on, args)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "README.md").write_text(report(found))
        (args.out / "figures.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=50.0, help="of a load at most")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--equivalent", action="store_true", help="give the error in load, too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", TINY if args.tiny else SMALL)
        asyncio.run(run_all(model, args))


if __name__ == "__main__":
    main()
