"""`podway simulate`: runs a workload through the serving engine in virtual time.

The hardware is described by flags. Each policy runs at each load; the results are a table, JSON and
a plot. With --capacity, the command searches for the highest load that keeps the SLO instead. With
--replicas, the load goes to a fleet behind each router.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console

from engine.control.event_recorder import EventRecorder, Row, render
from engine.errors import EngineError, InvalidRequest
from engine.research.leaping.run import capacity, simulate
from engine.simulated.figures import SLO, Figures
from engine.simulated.replay import Recording, read_recording
from engine.simulated.run import Setup
from engine.simulated.trace import Arrival, at_rate, mean_rate
from engine.simulated.verify import RecordingVerifier
from gateway.commands.simulate.fleet import add_fleet, fleets, run_fleets, table_of
from gateway.commands.simulate.setups import (
    add_engine,
    add_hardware,
    add_workload,
    arrivals_of,
    setups,
)
from gateway.settings.flags import Parser, ShowDefaults, flag_type, output_file, plot_file

_LATENCIES = (  # measure, title, unit
    ("ttft", "TTFT\nms", 1e3),
    ("itl", "ITL\nms", 1e3),
    ("norm", "ms/\ntoken", 1e3),
    ("jct", "JCT\ns", 1.0),
)
_WIDE = 120  # characters; a narrower terminal shows mean and p99 only
_COUNTS = (
    "offered\n/s", "done\n/s", "good\n%", "out\ntok/s", "pre-\nempted", "swapped\nout",
    "kslots\nmoved", "peak\nqueue",
)  # fmt: skip


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
    add_workload(parser)
    add_hardware(parser)
    add_engine(parser)
    add_fleet(parser)
    add = parser.add_argument_group("results").add_argument
    slo = "latency objective in seconds; goodput counts the requests that keep it"
    add("--slo", type=_slo, default=SLO(), metavar="ttft=S,tpot=S,norm=S,jct=S", help=slo)
    add("--capacity", action="store_true", help="search for the highest requests/s within --slo")
    share = "share of requests that must keep the SLO for --capacity"
    add("--share", type=_share, default=0.9, metavar="P", help=share)
    add("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    events = "write the events of the run as JSON lines; needs a single policy and load"
    add("--events", type=output_file, metavar="FILE", help=events)
    plot = "write a plot (PNG, PDF or SVG): over load for several --rate values, else over time"
    add("--plot", type=plot_file, metavar="FILE", help=plot)


def _slo(text: str) -> SLO:
    try:
        return SLO.parse(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_share = flag_type(float, "a number above 0, at most 1", lambda number: 0.0 < number <= 1.0)


def run(args: argparse.Namespace) -> int:
    """Simulate and print the results; 1 and one error line if the flags are invalid."""
    try:
        recording = read_recording(args.replay) if args.replay else None
        arrivals = arrivals_of(args, recording)
        if (args.rate or args.capacity) and not mean_rate(arrivals):
            raise InvalidRequest("--rate and --capacity need requests at different times", "rate")
        all_setups = setups(args, recording)
        if args.replicas:
            return run_fleets(args, fleets(args, all_setups), arrivals)
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


def _show(args: argparse.Namespace, runs: Sequence[Figures], capacities: dict[str, float]) -> None:
    console = Console()
    show(sorted(runs, key=lambda run: (run.label, run.offered)), console)
    for label, rate in capacities.items():
        console.print(f"{label}: {rate:.3g} requests/s with {args.share:.0%} within the SLO")
    if args.json:
        results = {"capacity": capacities, "runs": [run.as_json() for run in runs]}
        args.json.write_text(json.dumps(results))
    if args.plot:  # matplotlib takes a second to import
        from gateway.commands.plots import by_label, draw_load, draw_time

        series = by_label(runs)
        if any(len(loads) > 1 for loads in series.values()):
            draw_load(series, args.plot)
        else:
            draw_time(runs, args.plot)


def show(runs: Sequence[Figures], console: Console) -> None:
    """Print a table of rates and counts, then one of latencies; one row per run."""
    points = ("mean", "p50", "p90", "p99") if console.width >= _WIDE else ("mean", "p99")
    columns = [(*latency, point) for latency in _LATENCIES for point in points]
    counts = table_of(*_COUNTS)
    times = table_of(*(f"{title}\n{point}" for _, title, _, point in columns))
    for run in runs:
        counts.add_row(_name(run), *_counts(run))
        times.add_row(_name(run), *(_cell(run, m, unit, point) for m, _, unit, point in columns))
    console.print(counts)
    console.print(times)


def _name(run: Figures) -> str:
    return f"{run.label} @{run.offered:.3g}/s"


def _counts(run: Figures) -> tuple[str, ...]:
    return (
        f"{run.offered:.3g}",
        f"{run.throughput:.3g}",
        f"{100 * run.attainment:.1f}",
        f"{run.output_rate:,.0f}",
        str(run.num_preempted),
        str(run.num_swapped),
        f"{run.swapped_slots / 1e3:,.0f}",
        str(run.peak_waiting),
    )


def _cell(run: Figures, measure: str, unit: float, point: str) -> str:
    value = run.at(measure, point)
    if value is None:
        return "-"
    return f"{value * unit:.0f}" if value * unit >= 100 else f"{value * unit:.3g}"
