"""`podway simulate --replicas N`: a fleet of replicas behind a router."""

import argparse
import json
import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from engine.errors import InvalidRequest
from engine.research.fleet.figures import FleetFigures
from engine.research.fleet.router import ROUTERS
from engine.research.fleet.simulation import FleetSetup, simulate_fleet
from engine.simulated.run import Setup
from engine.simulated.trace import Arrival, at_rate
from gateway.settings.flags import above_zero, positive


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a fleet."""
    add = parser.add_argument_group("fleet").add_argument
    add("--replicas", type=positive, metavar="N", help="servers with this hardware behind a router")
    add_router(parser)


def add_router(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the router, and of the processes that share the work."""
    add = parser.add_argument_group("router").add_argument
    routers = f"{', '.join(ROUTERS)}; one run for each"
    add("--router", nargs="+", choices=ROUTERS, default=["prefix"], metavar="R", help=routers)
    epoch = "seconds between two load reports of a replica"
    add("--report-interval", type=above_zero, default=0.1, metavar="S", help=epoch)
    processes = "processes that advance the replicas (default: one per core)"
    add("--processes", type=positive, metavar="N", help=processes)


def processes_of(args: argparse.Namespace) -> int:
    """The number of processes for the replicas."""
    return args.processes or os.cpu_count() or 1


def fleets(args: argparse.Namespace, setups: Sequence[Setup]) -> list[FleetSetup]:
    """A fleet for each router and setup. Raises `InvalidRequest`."""
    if args.capacity or args.replay or args.events:
        raise InvalidRequest("--capacity, --replay and --events are for a single replica")
    interval, processes = args.report_interval, processes_of(args)
    return [
        FleetSetup(setup, args.replicas, router, interval, processes)
        for setup in setups
        for router in args.router
    ]


def run_fleets(
    args: argparse.Namespace, fleets: Sequence[FleetSetup], arrivals: Sequence[Arrival]
) -> int:
    """Simulate each fleet at each load, and print, save and plot the figures."""
    loads = [at_rate(arrivals, rate) for rate in args.rate] if args.rate else [arrivals]
    runs = [simulate_fleet(fleet, load) for fleet in fleets for load in loads]
    show_fleets(runs, Console())
    if args.json:
        args.json.write_text(json.dumps({"runs": [run.as_json() for run in runs]}))
    if args.plot:  # matplotlib takes a second to import
        from gateway.commands.plots import draw_fleets

        draw_fleets(runs, args.plot)
    return 0


def show_fleets(runs: Sequence[FleetFigures], console: Console) -> None:
    """Print a table of rates and shares, then one of latencies; one row per run."""
    rates = table_of(*_RATES)
    times = table_of(*(f"{title}\n{point}" for _, title, point, _ in _LATENCIES))
    for run in runs:
        rates.add_row(
            run.label,
            f"{run.offered:.3g}",
            f"{run.throughput:.3g}",
            f"{100 * run.attainment:.1f}",
            f"{100 * run.cached_share:.1f}",
            f"{100 * run.busy_mean:.0f}",
            f"{100 * run.busy_p5:.0f}-{100 * run.busy_p95:.0f}",
            f"{run.replica_hours:,.1f}",
        )
        cells = (_cell(run, measure, point, unit) for measure, _, point, unit in _LATENCIES)
        times.add_row(run.label, *cells)
    console.print(rates)
    console.print(times)


def table_of(*titles: str) -> Table:
    """An empty table with a column for labels and one for each title."""
    columns = (Column(title, justify="right", no_wrap=True) for title in titles)
    return Table(
        Column(no_wrap=True), *columns, header_style="bold", box=None, padding=(0, 1, 0, 0)
    )


_RATES = (
    "offered\n/s",
    "done\n/s",
    "good\n%",
    "cached\n%",
    "busy\n%",
    "busy %\np5-p95",
    "replica\nhours",
)
_LATENCIES = (
    ("ttft", "TTFT s", "p50", 1.0),
    ("ttft", "TTFT s", "p99", 1.0),
    ("itl", "ITL ms", "p50", 1e3),
    ("itl", "ITL ms", "p99", 1e3),
    ("jct", "JCT s", "p50", 1.0),
    ("jct", "JCT s", "p99", 1.0),
)


def _cell(run: FleetFigures, measure: str, point: str, unit: float) -> str:
    value = run.at(measure, point)
    return "-" if value is None else f"{value * unit:.3g}"
