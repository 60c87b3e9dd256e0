"""A fleet in virtual time: routers at equal load, the GPUs that each needs, and the speed.

Scheduler, KV ledger and prefix cache of every replica are those of the server; steps take what a
roofline model predicts. An hour of each trace is superposed until it loads the fleet: copies are
shifted by up to a minute and share no prefixes. Every figure is a function of the trace, so the
machine and its load change none but the speed. Writes fleet.json, plots and README.md.

    python -m examples.benchmarks.virtual_time.fleet --traces DIR
        [--replicas 100] [--seconds 3600] [--only azure mooncake plan largest outages] [--out DIR]

DIR has azure_2023_conv.csv.gz and mooncake_conversation.jsonl.gz. `largest` is 1,000 replicas and
an hour of each trace behind one router (`--largest` selects the traces); `outages` are `--replicas`
behind the server's placement while machines die and an upgrade rolls through. Each takes about five
minutes on two idle cores. Run again, it compares its figures with those of fleet.json, bit for bit.
"""

import argparse
import hashlib
import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any

from engine.control.settings import SchedulerSettings
from engine.policy import build
from engine.research.fleet.figures import FleetFigures
from engine.research.fleet.plan import Goals, Plan, fewest_replicas, replicas_for_work
from engine.research.fleet.router import ROUTERS
from engine.research.fleet.simulation import (
    FleetSetup,
    OutagePlan,
    figures_of,
    run_fleet,
    simulate_fleet,
)
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.simulated.figures import Distribution
from engine.simulated.run import Setup
from engine.simulated.trace import Arrival, between, read_trace, superposed
from examples.benchmarks.virtual_time.azure_hour import processor
from examples.benchmarks.virtual_time.fleet_page import report
from gateway.commands.plots import draw_fleets, draw_plans

OUT = Path(__file__).parents[1] / "results" / "fleet"
UNBOUNDED = 10**9
LARGEST = 1000  # replicas
LARGEST_ROUTERS = {"azure": "least-tokens", "mooncake": "prefix"}
OUTAGE_SHARE = 0.045  # of the trace's rate, for each replica under `outages`: there is room
MACHINE = 10  # replicas
AT_ONCE = 0.2  # share of the machines that are upgraded at the same time
NUM_DEATHS = 10
UPGRADE_AT = 0.1  # share of the trace after which the upgrade begins
PLANNED_COPIES, PLANNED_SECONDS = 2, 600.0  # of the load for which GPUs are counted


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, the replicas that serve it, and how much of it each replica gets."""

    name: str
    trace: str
    title: str
    hardware: Deployment
    routers: tuple[str, ...]
    share: float  # of the trace's own rate, for each replica
    block_size: int
    reuses_prefixes: bool
    goals: str

    def setup(self) -> Setup:
        settings = SchedulerSettings(
            max_model_len=131_072,
            max_batch_size=256,
            max_batch_tokens=8192,
            max_queue_requests=UNBOUNDED,
            max_queue_tokens=UNBOUNDED,
            reuses_prefixes=self.reuses_prefixes,
        )
        hardware = self.hardware
        return Setup(
            "fcfs", settings, build_fcfs, hardware.cost(), hardware.num_slots, self.block_size
        )


build_fcfs = partial(build, "fcfs")
AZURE = Case(
    name="azure",
    trace="azure_2023_conv.csv.gz",
    title="Azure conversations on Llama-3.1-8B, one L4 per replica",
    hardware=Deployment(DEVICES["l4"], SHAPES["llama-3.1-8b"]),
    routers=("round-robin", "least-tokens"),
    share=0.09,
    block_size=16,
    reuses_prefixes=False,  # the trace has no prefixes
    goals="ttft.p99=2,itl.p99=0.5",
)
MOONCAKE = Case(
    name="mooncake",
    trace="mooncake_conversation.jsonl.gz",
    title="Mooncake conversations on Llama-3.1-70B, four A100-80GB per replica",
    hardware=Deployment(DEVICES["a100-80gb"], SHAPES["llama-3.1-70b"], ranks=4),
    routers=tuple(ROUTERS),
    share=0.04,
    block_size=128,
    reuses_prefixes=True,
    goals="ttft.p90=20,jct.p50=30",
)


def load_of(case: Case, traces: Path, replicas: int, seconds: float) -> list[Arrival]:
    """The trace, superposed so that each replica gets its share."""
    arrivals = between(read_trace(traces / case.trace), 0.0, seconds)
    return superposed(arrivals, max(1, round(case.share * replicas)), Random(0))


def cpu_seconds() -> float:
    """Of this process and the processes that it has started and waited for."""
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, both))


def compared(case: Case, args: argparse.Namespace, *, has_plot: bool = True) -> dict[str, Any]:
    """The case's routers under one load."""
    arrivals = load_of(case, args.traces, args.replicas, args.seconds)
    rows = compare_routers(case, arrivals, args, has_plot=has_plot)
    return facts_of(case, arrivals, args) | {"rows": rows}


def facts_of(case: Case, arrivals: Sequence[Arrival], args: argparse.Namespace) -> dict[str, Any]:
    """What was played, and on what."""
    return {
        "title": case.title,
        "processor": processor(),
        "processes": args.processes,
        "replicas": args.replicas,
        "seconds": args.seconds,
        "requests": len(arrivals),
    }


def compare_routers(
    case: Case, arrivals: Sequence[Arrival], args: argparse.Namespace, *, has_plot: bool
) -> list[dict[str, Any]]:
    """The figures of each router, and the speed of the simulation."""
    fleet = FleetSetup(case.setup(), args.replicas, processes=args.processes)
    found, runs = [], []
    for router in case.routers:
        started, began = time.perf_counter(), cpu_seconds()
        figures = simulate_fleet(replace(fleet, router=router), arrivals)
        speed = {"wall": time.perf_counter() - started, "cpu": cpu_seconds() - began}
        runs.append(figures)
        found.append(
            {
                "router": router,
                "digest": digest(figures),
                "speed": speed,
                "load_average": os.getloadavg()[0],
                **row(figures),
            }
        )
        print(case.name, router, speed, found[-1]["digest"], flush=True)
    if has_plot:
        draw_fleets(runs, args.out / f"{case.name}.png")
    return found


def largest(case: Case, args: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """The largest fleet under this trace. `repeated` has the speeds of earlier runs with the same
    figures. Raises `SystemExit` if the figures of an earlier run differ."""
    name = f"largest_{case.name}"
    case = replace(case, name=name, routers=(LARGEST_ROUTERS[case.name],))
    found = compared(case, args, has_plot=False)
    earlier: dict[str, Any] | None = before.get(name)
    if earlier is None or earlier["requests"] != found["requests"]:
        return found | {"repeated": []}
    (new,), (old,) = found["rows"], earlier["rows"]
    if new["digest"] != old["digest"]:
        raise SystemExit(f"{name}: digest {new['digest']}, but {old['digest']} in an earlier run")
    fields = {"processes": found["processes"], "processor": found["processor"]}
    again = fields | {key: new[key] for key in ("digest", "speed", "load_average")}
    return earlier | {"repeated": [*earlier["repeated"], again]}


def disturbed(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """The largest fleet while machines die and an upgrade rolls through them."""
    arrivals = load_of(case, args.traces, args.replicas, args.seconds)
    machines, random = args.replicas // MACHINE, Random(0)
    plan = OutagePlan(
        MACHINE,
        {random.uniform(0.0, args.seconds): random.randrange(machines) for _ in range(NUM_DEATHS)},
        UPGRADE_AT * args.seconds,
        max(1, round(AT_ONCE * machines)),
    )
    fleet = FleetSetup(
        case.setup(), args.replicas, "forecast", processes=args.processes, outages=plan
    )
    started, began = time.perf_counter(), cpu_seconds()
    run = run_fleet(fleet, arrivals)
    figures = figures_of(fleet, arrivals, run)
    pauses = [seconds for one in run.results for seconds in one.pauses]
    speed = {"wall": time.perf_counter() - started, "cpu": cpu_seconds() - began}
    assert run.outages is not None, "there is a plan"
    found: dict[str, Any] = {"router": fleet.router, "digest": digest(figures), "speed": speed}
    found |= {"load_average": os.getloadavg()[0], **row(figures)}
    return facts_of(case, arrivals, args) | {
        "machines": machines,
        "deaths": NUM_DEATHS,
        "upgrade_at": plan.upgrade_at,
        "at_once": plan.at_once,
        "moved": run.outages.num_moved,
        "upgraded_at": run.outages.upgraded_at if isfinite(run.outages.upgraded_at) else None,
        "least_active": min(moment.active for moment in figures.moments),
        "pauses": asdict(spread) if (spread := Distribution.of(sorted(pauses))) else None,
        "rows": [found],
    }


def row(figures: FleetFigures) -> dict[str, Any]:
    """The figures without samples over time."""
    return {name: value for name, value in figures.as_json().items() if name != "moments"}


def digest(figures: FleetFigures) -> str:
    """A hash of all figures and all samples over time."""
    return hashlib.sha256(json.dumps(figures.as_json()).encode()).hexdigest()[:16]


def count_gpus(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """The fewest GPUs for a fixed load that meet the case's goals, by router."""
    arrivals = between(read_trace(args.traces / case.trace), 0.0, PLANNED_SECONDS)
    arrivals = superposed(arrivals, PLANNED_COPIES, Random(0))
    setup, goals = case.setup(), Goals.parse(case.goals)
    gpus = case.hardware.stages * case.hardware.ranks
    start = replicas_for_work(setup, arrivals)
    plans: dict[str, Plan] = {}
    for router in ROUTERS if case.reuses_prefixes else case.routers:
        fleet = FleetSetup(setup, 1, router, processes=args.processes)

        def run(replicas: int, fleet: FleetSetup = fleet) -> FleetFigures:
            return simulate_fleet(replace(fleet, replicas=replicas), arrivals)

        plans[router] = fewest_replicas(run, goals, start, 1 << 12)
        print(case.name, router, plans[router].replicas, sorted(plans[router].runs), flush=True)
    draw_plans(plans, goals, gpus, args.out / f"{case.name}_plan.png")
    return {
        "goals": case.goals,
        "requests": len(arrivals),
        "seconds": PLANNED_SECONDS,
        "routers": {
            router: {
                "gpus": None if plan.replicas is None else gpus * plan.replicas,
                "runs": {count: row(figures) for count, figures in sorted(plan.runs.items())},
            }
            for router, plan in plans.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of each trace")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parts = ("azure", "mooncake", "plan", "largest", "outages")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART")
    names = tuple(LARGEST_ROUTERS)
    parser.add_argument("--largest", nargs="+", choices=names, default=names, metavar="TRACE")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "fleet.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for case in (AZURE, MOONCAKE):
        if case.name in args.only:
            found[case.name] = compared(case, args)
        if "plan" in args.only:
            found[f"{case.name}_plan"] = {"title": case.title} | count_gpus(case, args)
    if "outages" in args.only:
        found["outages"] = disturbed(replace(AZURE, share=OUTAGE_SHARE), args)
    if "largest" in args.only:
        args.replicas = LARGEST
        for case in (AZURE, MOONCAKE):
            if case.name in args.largest:
                found[f"largest_{case.name}"] = largest(case, args, found)
    path.write_text(json.dumps(found, indent=1) + "\n")
    check = args.out / "fleet_check.json"
    read = json.loads(check.read_text()) if check.exists() else None
    (args.out / "README.md").write_text(report(found, read))


if __name__ == "__main__":
    main()
