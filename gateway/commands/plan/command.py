"""`podway plan`: how many GPUs a load needs to keep its latencies within limits.

For each router and policy the command searches for the fewest replicas that meet all goals, by
simulating the whole load on each number it tries. The results are a table, JSON and a plot.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from engine.errors import EngineError, InvalidRequest
from engine.research.fleet.figures import FleetFigures
from engine.research.fleet.plan import Goals, Plan, fewest_replicas, replicas_for_work
from engine.research.fleet.simulation import FleetSetup, simulate_fleet
from engine.simulated.figures import SLO
from engine.simulated.trace import Arrival
from gateway.commands.simulate.fleet import add_router, processes_of, table_of
from gateway.commands.simulate.setups import (
    add_engine,
    add_hardware,
    add_workload,
    arrivals_of,
    setups,
)
from gateway.settings.flags import Parser, ShowDefaults, output_file, plot_file, positive


def parser() -> Parser:
    """The flags of `podway plan`."""
    parser = Parser(
        "podway plan",
        description="Find the fewest GPUs that serve a load within latency limits.",
        usage="podway plan --goal ttft.p99=2,itl.p99=0.1 [flags]",
        formatter_class=ShowDefaults,
    )
    goal = "limits in seconds on percentiles, such as ttft.p99=2,itl.p99=0.1,jct.p50=30"
    parser.add_argument("--goal", type=_goals, required=True, metavar="G", help=goal)
    most = "replicas that the search tries at most"
    parser.add_argument("--most", type=positive, default=4096, metavar="N", help=most)
    add_workload(parser)
    add_hardware(parser)
    add_engine(parser)
    add_router(parser)
    add = parser.add_argument_group("results").add_argument
    add("--json", type=output_file, metavar="FILE", help="write all runs as JSON")
    add("--plot", type=plot_file, metavar="FILE", help="plot the latencies over replicas")
    parser.set_defaults(slo=SLO(), replay=None, rate=None, capacity=False)
    return parser


def _goals(text: str) -> Goals:
    try:
        return Goals.parse(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        plans = _plans(args, arrivals_of(args))
    except (EngineError, OSError) as error:
        sys.stderr.write(f"podway plan: {error}\n")
        return 1
    gpus = (args.stages or 1) * args.ranks
    _show(plans, args.goal, gpus, Console())
    if args.json:
        args.json.write_text(json.dumps(_as_json(plans, gpus)))
    if args.plot:  # matplotlib takes a second to import
        from gateway.commands.plots import draw_plans

        draw_plans(plans, args.goal, gpus, args.plot)
    return 0


def _plans(args: argparse.Namespace, arrivals: Sequence[Arrival]) -> dict[str, Plan]:
    """The plan of each router and policy, by its label."""
    found: dict[str, Plan] = {}
    for setup in setups(args, None):
        start = replicas_for_work(setup, arrivals)
        for router in args.router:
            fleet = FleetSetup(
                setup, 1, router, epoch=args.report_interval, processes=processes_of(args)
            )

            def run(replicas: int, fleet: FleetSetup = fleet) -> FleetFigures:
                figures = simulate_fleet(replace(fleet, replicas=replicas), arrivals)
                missed = ", ".join(args.goal.misses(figures)) or "none"
                sys.stderr.write(f"{fleet.label}, {replicas} replicas: missed goals: {missed}\n")
                return figures

            found[fleet.label] = fewest_replicas(run, args.goal, start, args.most)
    return found


def _show(plans: Mapping[str, Plan], goals: Goals, gpus: int, console: Console) -> None:
    """Print a row for each plan: replicas, GPUs, and the latencies with so many."""
    limits = (f"{goal.name}\n<= {goal.seconds:g} s" for goal in goals.limits)
    table = table_of("replicas", "GPUs", *limits, "cached\n%", "busy\n%")
    for label, plan in plans.items():
        if plan.replicas is None:
            table.add_row(label, f"> {max(plan.runs)}")
            continue
        run = plan.runs[plan.replicas]
        values = [run.at(goal.measure, goal.point) for goal in goals.limits]
        cells = ["-" if value is None else f"{value:.3g}" for value in values]
        shares = f"{100 * run.cached_share:.1f}", f"{100 * run.busy_mean:.0f}"
        table.add_row(label, str(plan.replicas), str(plan.replicas * gpus), *cells, *shares)
    console.print(table)


def _as_json(plans: Mapping[str, Plan], gpus: int) -> dict[str, object]:
    return {
        label: {
            "replicas": plan.replicas,
            "gpus": None if plan.replicas is None else plan.replicas * gpus,
            "runs": {count: run.as_json() for count, run in sorted(plan.runs.items())},
        }
        for label, plan in plans.items()
    }
