"""`podway simulate`: runs a workload through the serving engine in virtual time.

The hardware is described by flags. Each policy runs at each load; the results are a table, JSON and
a plot. With --capacity, the command searches for the highest load that keeps the SLO instead.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

from rich.console import Console

from engine.control.event_recorder import EventRecorder, Row, render
from engine.errors import EngineError, InvalidRequest
from engine.simulated.capacity import capacity
from engine.simulated.figures import SLO, Figures
from engine.simulated.replay import Recording, read_recording
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import (
    Arrival,
    at_rate,
    between,
    gamma,
    mean_rate,
    orca_lengths,
    poisson,
    read_trace,
    skewed_lengths,
    sped_up,
    steady,
)
from engine.simulated.verify import RecordingVerifier
from gateway.commands.simulate.setups import add_engine, add_hardware, setups
from gateway.commands.simulate.tables import show
from gateway.settings.flags import (
    Parser,
    ShowDefaults,
    above_zero,
    output_file,
    plot_file,
    positive,
)


def parser() -> Parser:
    """The flags of `podway simulate`."""
    parser = Parser(
        "podway simulate",
        description="Run a trace or a synthetic load through the scheduler in virtual time.",
        usage="podway simulate [flags]",
        formatter_class=ShowDefaults,
    )
    add_arguments(parser)
    return parser


def main(argv: list[str]) -> int:
    return run(parser().parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for workload, hardware, engine and results."""
    _add_workload(parser)
    add_hardware(parser)
    add_engine(parser)
    add = parser.add_argument_group("results").add_argument
    slo = "latency objective in seconds; goodput counts the requests that keep it"
    add("--slo", type=_slo, default=SLO(), metavar="ttft=S,tpot=S,norm=S,jct=S", help=slo)
    add("--capacity", action="store_true", help="search for the highest requests/s within --slo")
    share = "share of requests that must keep the SLO for --capacity"
    add("--share", type=_share, default=0.9, metavar="P", help=share)
    add("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    events = "write the events of the run as JSON lines; needs a single policy and load"
    add("--events", type=output_file, metavar="FILE", help=events)
    plot = "write a PNG plot: over load for several --rate values, else over time"
    add("--plot", type=plot_file, metavar="FILE", help=plot)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--trace", type=Path, metavar="FILE", help="CSV or Mooncake JSONL, plain or .gz")
    add("--replay", type=Path, metavar="FILE", help="a file that podway serve --record wrote")
    lengths = "distribution of prompt and output lengths without --trace"
    add("--lengths", choices=("orca", "skewed"), default="orca", help=lengths)
    arrivals = "arrival process without --trace"
    add("--arrivals", choices=("poisson", "gamma", "steady"), default="poisson", help=arrivals)
    variation = "coefficient of variation of gamma's gaps"
    add("--variation", type=above_zero, default=2.0, metavar="CV", help=variation)
    rate = "requests/s; one run for each; a trace is stretched to the rate"
    add("--rate", type=above_zero, nargs="+", metavar="R", help=rate)
    add("--time-scale", type=above_zero, default=1.0, metavar="X", help="replay X times as fast")
    start, stop = "first second of the trace to use", "last second of the trace to use"
    add("--from", type=float, default=0.0, dest="start", metavar="S", help=start)
    add("--to", type=float, default=float("inf"), dest="stop", metavar="S", help=stop)
    count = "number of requests (default 1000, or the whole trace)"
    add("-n", "--requests", type=positive, metavar="N", help=count)
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths and arrivals")


def _slo(text: str) -> SLO:
    try:
        return SLO.parse(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    if not 0.0 < (number := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return number


def run(args: argparse.Namespace) -> int:
    """Simulate and print the results; 1 and one error line if the flags are invalid."""
    try:
        recording = read_recording(args.replay) if args.replay else None
        arrivals = _arrivals(args, recording)
        all_setups = setups(args, recording)
        if args.capacity:
            runs, capacities = _search(args, all_setups, arrivals)
        else:
            runs, capacities = _sweep(args, all_setups, arrivals), {}
        if recording is not None:
            runs = [*_reproduced(args, recording), *runs]
    except (EngineError, OSError) as error:
        sys.stderr.write(f"podway simulate: {error}\n")
        return 1
    _show(args, runs, capacities)
    return 0


def _sweep(
    args: argparse.Namespace, setups: Sequence[Setup], arrivals: Sequence[Arrival]
) -> list[Figures]:
    loads = [at_rate(arrivals, rate) for rate in args.rate] if args.rate else [arrivals]
    if args.events:
        if len(setups) * len(loads) > 1:
            raise InvalidRequest("--events needs a single policy and load", "events")
        return [_with_events(setups[0], loads[0], args.events)]
    return [simulate(setup, load) for setup, load in product(setups, loads)]


def _with_events(setup: Setup, arrivals: Sequence[Arrival], path: Path) -> Figures:
    """Simulate, and write each event as the line that a recording has for it."""
    with path.open("w", encoding="utf-8") as file:

        def write(row: Row) -> None:
            file.write(render(row, _block_name) + "\n")

        return simulate(setup, arrivals, EventRecorder(write, setup.block_size))


def _block_name(block: bytes | str) -> str:
    return block.hex() if isinstance(block, bytes) else block


def _search(
    args: argparse.Namespace, setups: Sequence[Setup], arrivals: Sequence[Arrival]
) -> tuple[list[Figures], dict[str, float]]:
    """Every run of the searches, and the highest rate of each setup by its label."""
    if args.slo == SLO():
        raise InvalidRequest("--capacity requires --slo", "slo")
    start = args.rate[0] if args.rate else mean_rate(arrivals)
    runs: list[Figures] = []
    capacities: dict[str, float] = {}
    for setup in setups:
        result = capacity(setup, arrivals, lambda run: run.attainment >= args.share, start)
        if result.rate == max(result.runs):
            raise InvalidRequest(
                f"--capacity found no limit for {setup.label}: {len(arrivals)} requests are so few "
                "that they keep the SLO even if all arrive at once; use more requests (-n)",
                "requests",
            )
        runs.extend(result.runs.values())
        capacities[setup.label] = result.rate
    return runs, capacities


def _reproduced(args: argparse.Namespace, recording: Recording) -> list[Figures]:
    """The recorded run itself, if the simulator reproduces its schedule; prints whether it does."""
    followed = RecordingVerifier(recording).verify(args.slo)
    count = followed.num_iterations
    if followed.figures is None:
        sys.stderr.write(f"the schedule differs after {count} iterations: {followed.difference}\n")
        return []
    sys.stdout.write(f"the schedule is reproduced: {count} iterations\n")
    sys.stdout.write(f"error of the fitted cost model: {recording.cost_error()}\n")
    return [followed.figures]


def _arrivals(args: argparse.Namespace, recording: Recording | None) -> list[Arrival]:
    """The arrivals at their own times; a synthetic load has one request per second."""
    if recording is not None:
        if args.trace:
            raise InvalidRequest("--replay and --trace cannot be combined", "replay")
        arrivals = between(recording.arrivals, args.start, args.stop)[: args.requests]
        arrivals = sped_up(arrivals, args.time_scale)
    elif args.trace:
        arrivals = between(read_trace(args.trace), args.start, args.stop)[: args.requests]
        arrivals = sped_up(arrivals, args.time_scale)
    else:
        arrivals = _synthetic(args)
    if (args.rate or args.capacity) and not mean_rate(arrivals):
        raise InvalidRequest("--rate and --capacity need requests at different times", "rate")
    if not arrivals:
        raise InvalidRequest("no request arrives between --from and --to", "from")
    return arrivals


def _synthetic(args: argparse.Namespace) -> list[Arrival]:
    random, count = Random(args.seed), args.requests or 1000
    lengths = orca_lengths if args.lengths == "orca" else skewed_lengths()
    if args.arrivals == "gamma":
        return gamma(args.time_scale, count, lengths, random, args.variation)
    process = poisson if args.arrivals == "poisson" else steady
    return process(args.time_scale, count, lengths, random)


def _show(args: argparse.Namespace, runs: Sequence[Figures], capacities: dict[str, float]) -> None:
    console = Console()
    show(sorted(runs, key=lambda run: (run.label, run.offered)), console)
    for label, rate in capacities.items():
        console.print(f"{label}: {rate:.3g} requests/s with {args.share:.0%} within the SLO")
    if args.json:
        results = {"capacity": capacities, "runs": [run.as_json() for run in runs]}
        args.json.write_text(json.dumps(results))
    if args.plot:  # matplotlib takes a second to import
        from gateway.commands.simulate.curves import by_label, draw_load, draw_time

        series = by_label(runs)
        if any(len(loads) > 1 for loads in series.values()):
            draw_load(series, args.plot)
        else:
            draw_time(runs, args.plot)
