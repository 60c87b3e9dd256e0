"""The simulator beside the real engine: predictions, measurements and errors.

A small model on this machine's CPU; the Azure conversation trace with its lengths divided, at
three loads under two policies. Predictions use the cost model measured when a server starts, and
one fitted to the recording of another run. Writes README.md and figures.json.

    python -m examples.benchmarks.real_engine.simulator_accuracy
        [--requests 200] [--repeats 2] [--out DIR]
"""

import argparse
import asyncio
import json
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from engine.cost.model import CostModel
from engine.simulated.figures import SLO, Figures
from engine.simulated.verify import RecordingVerifier
from examples.benchmarks.real_engine import loads
from examples.benchmarks.real_engine.machine import (
    LARGE,
    TINY,
    Machine,
    circumstances,
    clock_of,
    machine,
    make_model,
)
from examples.benchmarks.real_engine.running import Run, capacity, measure, simulate

OUT = Path(__file__).parents[1] / "results" / "accuracy"
MEASURES = (
    ("TTFT p50 ms", "ttft", "p50"),
    ("TTFT p99 ms", "ttft", "p99"),
    ("ITL p50 ms", "itl", "p50"),
    ("JCT p50 ms", "jct", "p50"),
    ("JCT p99 ms", "jct", "p99"),
)
LAST = "output tokens/s"
Values = dict[str, float]


def values(figures: Figures) -> Values:
    """The compared quantities of a run."""
    found = {title: 1e3 * (figures.at(measure, point) or 0.0) for title, measure, point in MEASURES}
    return found | {LAST: figures.output_rate}


def averaged(runs: list[Values]) -> Values:
    return {title: mean(run[title] for run in runs) for title in runs[0]}


def errors(predicted: Values, measured: Values) -> Values:
    """Relative to the measurement."""
    return {title: predicted[title] / measured[title] - 1.0 for title in measured}


async def predicted(on: Machine, policy: str, calls: list[loads.Call], cost: CostModel) -> Values:
    run = await asyncio.to_thread(simulate, on.header(policy, cost), calls)
    return values(run.figures)


async def calibrated(on: Machine, count: int, rate: float) -> CostModel:
    """A cost model fitted to the recording of a separate run with other arrivals."""
    run = await measure(on, on.header("fcfs"), loads.two_kinds(count, rate, seed=7))
    assert run.recording is not None, "every real run is recorded"
    return run.recording.cost()


def is_reproduced(run: Run) -> bool:
    assert run.recording is not None, "every real run is recorded"
    return RecordingVerifier(run.recording).verify(SLO()).difference is None


async def compare(on: Machine, args: argparse.Namespace) -> list[dict[str, object]]:
    """A dictionary for each load and policy."""
    most = await capacity(on, loads.azure(args.requests, 1.0))
    recorded = await calibrated(on, args.requests, args.loads[0] * most / 2)
    rows: list[dict[str, object]] = []
    for load in args.loads:
        rate = load * most
        calls = loads.azure(args.requests, rate)
        for policy in ("fcfs", "mlfq"):
            costs = {"at the start": await on.measured(), "from a recording": recorded}
            runs = [await measure(on, on.header(policy), calls) for _ in range(args.repeats)]
            measured = [values(run.figures) for run in runs]
            middle = averaged(measured)
            own = runs[0].recording
            assert own is not None, "every real run is recorded"
            row: dict[str, object] = {
                "load": load,
                "rate": rate,
                "policy": policy,
                "measured": middle,
                "apart": {t: max(abs(m[t] / middle[t] - 1.0) for m in measured) for t in middle},
                "reproduced": all(map(is_reproduced, runs)),
                "errors": {
                    name: errors(await predicted(on, policy, calls, cost), middle)
                    for name, cost in (costs | {"from itself": own.cost()}).items()
                },
            }
            rows.append(row)
            print(table([row]), flush=True)
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Measured values, the distance of the runs from their mean, and the errors."""
    titles = [*(title for title, *_ in MEASURES), LAST]
    lines = [f"| load, policy | | {' | '.join(titles)} |", "|" + "---|" * (len(titles) + 2)]
    for row in rows:
        name = f"{row['load']:.0%} ({row['rate']:.1f}/s), {row['policy']}"
        measured, apart, found = row["measured"], row["apart"], row["errors"]
        assert isinstance(measured, dict)
        assert isinstance(apart, dict)
        assert isinstance(found, dict)
        cells = (f"{measured[t]:.1f} ± {apart[t]:.0%}" for t in titles)
        lines.append(f"| {name} | measured | {' | '.join(cells)} |")
        for origin, error in found.items():
            cells = (f"{error[t]:+.0%}" for t in titles)
            lines.append(f"| | cost {origin} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(on: Machine, rows: list[dict[str, object]], args: argparse.Namespace) -> str:
    size = on.report.num_parameters / 1e6
    alone = on.cost.compute(1, 64) * 1e3
    count = sum(bool(row["reproduced"]) for row in rows)
    return f"""# Predicted and measured

`python -m examples.benchmarks.real_engine.simulator_accuracy`: the engine of the server, requests
from the same process without HTTP; a Llama with random weights, {size:.0f} M parameters,
{args.threads} compute thread(s), batches of 8 requests or 256 tokens. {args.requests} requests of
the Azure conversation trace, lengths divided by 8; each load and policy measured {args.repeats}
times (± the largest distance of a run from their mean). Loads are shares of the simulated capacity
under fcfs. {circumstances()}. {clock_of(on.is_counted)}

Errors are those of the simulation relative to the mean of the runs. *At the start*: with the cost
model that a server measures before it is ready, here before each row (a single decode step took
{alone:.1f} ms). *From a recording*: fitted to the iterations of another, lighter run. *From
itself*: fitted to the first of the compared runs; the remaining error does not come from the cost
of steps.

{table(rows)}

The recorded schedule of every run was replayed event by event: {count} of {len(rows)} rows came out
the same.
"""


async def run_all(model: Path, args: argparse.Namespace) -> None:
    async with machine(model, args.threads, args.clock == "cpu") as on:
        rows = await compare(on, args)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "README.md").write_text(report(on, rows, args))
        (args.out / "figures.json").write_text(json.dumps(rows, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.2])
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model", TINY if args.tiny else LARGE)
        asyncio.run(run_all(model, args))


if __name__ == "__main__":
    main()
