"""Autoscaling in virtual time: replicas, TTFT and cost over an hour, beside fleets of fixed size.

    python -m examples.benchmarks.virtual_time.autoscaling --traces DIR [--copies 3] [--out DIR]

The Azure conversation hour, superposed `--copies` times, at replicas of Llama-3.1-8B on one L4 each
behind the least-tokens router. Three fleets: one that grows and shrinks with waiting tokens and
the use of KV memory, one of its mean size (the same cost), and one of its largest size. Writes
autoscaling.json and autoscaling.png, which the page of `virtual_time.fleet` shows. Takes about a
CPU minute.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy

from engine.research.fleet.autoscaler import AutoscaleSettings
from engine.research.fleet.simulation import FleetRun, FleetSetup, figures_of, run_fleet
from engine.simulated.figures import SLO
from engine.simulated.trace import Arrival, read_trace, superposed
from examples.benchmarks.virtual_time.fleet import AZURE, OUT

GOAL = 2.0  # seconds of TTFT within which a request counts as good
MINUTE = 60.0


def settings_for(copies: int) -> AutoscaleSettings:
    """Bounds on both sides of what the load needs, and a new replica in a minute."""
    return AutoscaleSettings(least=3 * copies, most=40 * copies)


def minutes_of(arrivals: Sequence[Arrival], run: FleetRun) -> dict[str, list[float]]:
    """For each minute: arrivals/s, replicas that take requests and that start, and the p95 of the
    TTFT of requests that arrived in it."""
    count = int(arrivals[-1].at / MINUTE) + 1
    waits: list[list[float]] = [[] for _ in range(count)]
    for result in run.results:
        for number, ttft in zip(result.numbers, result.ttft, strict=True):
            waits[int(arrivals[number].at / MINUTE)].append(ttft)
    moments = [[m for m in run.moments if int(m.at / MINUTE) == n] for n in range(count)]
    return {
        "rate": [len(each) / MINUTE for each in waits],
        "active": [float(numpy.mean([m.active for m in each])) for each in moments],
        "starting": [float(numpy.mean([m.starting for m in each])) for each in moments],
        "ttft_p95": [float(numpy.percentile(each, 95)) for each in waits],
    }


def row_of(name: str, fleet: FleetSetup, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """The figures of a fleet, as a whole and for each minute."""
    run = run_fleet(fleet, arrivals)
    figures = figures_of(fleet, arrivals, run)
    print(name, f"{figures.replica_hours:.1f} GPU hours, {figures.attainment:.1%} good", flush=True)
    return {
        "fleet": name,
        "gpu_hours": figures.replica_hours,
        "peak": figures.peak_replicas,
        "good": figures.attainment,
        "ttft": {point: figures.at("ttft", point) for point in ("p50", "p95", "p99")},
        "jct_p50": figures.at("jct", "p50"),
        "minutes": minutes_of(arrivals, run),
    }


def compare(arrivals: Sequence[Arrival], copies: int, processes: int) -> list[dict[str, Any]]:
    """The row of the autoscaled fleet, of its mean size and of its largest size."""
    setup = replace(AZURE.setup(), slo=SLO(ttft=GOAL))
    fleet = FleetSetup(setup, 1, "least-tokens", processes=processes)
    scaled = row_of("autoscaled", replace(fleet, autoscale=settings_for(copies)), arrivals)
    rows = [scaled]
    hours = arrivals[-1].at / 3600.0
    sizes = {"same cost": round(scaled["gpu_hours"] / hours), "largest size": scaled["peak"]}
    for name, size in sizes.items():
        title = f"{size} all the time ({name})"
        rows.append(row_of(title, replace(fleet, replicas=size), arrivals))
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot load and replicas over time, TTFT over time, and cost with the share of good ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(11, 10), layout="constrained")
    FigureCanvasAgg(figure)
    size, wait, cost = figure.subplots(3, 1, height_ratios=(3, 3, 1.6))
    scaled = rows[0]["minutes"]
    at = range(len(scaled["rate"]))
    arrivals = size.twinx()
    arrivals.fill_between(at, scaled["rate"], color="0.88", step="mid")
    arrivals.set(ylabel="requests/s (grey)", ylim=(0, 1.3 * max(scaled["rate"])))
    size.set_zorder(arrivals.get_zorder() + 1)
    size.patch.set_visible(False)
    total = numpy.add(scaled["active"], scaled["starting"])
    size.fill_between(at, scaled["active"], total, color="C0", alpha=0.35, label="starting (60 s)")
    for number, row in enumerate(rows):
        color, minutes = f"C{number}", row["minutes"]
        size.plot(at, minutes["active"], color=color, label=row["fleet"])
        wait.plot(at, minutes["ttft_p95"], color=color, label=row["fleet"])
    size.set(title="Replicas that take requests (one L4 each)", ylabel="replicas")
    size.set_ylim(bottom=0)
    size.legend(loc="lower center", ncols=2)
    wait.axhline(GOAL, color="black", linestyle="--", linewidth=0.9)
    wait.annotate(f"goal: {GOAL:g} s", (1, GOAL), (0, 4), textcoords="offset points")
    wait.set(yscale="log", ylabel="seconds", xlabel="minutes since the start of the trace")
    wait.yaxis.set_major_formatter(ScalarFormatter())
    wait.set_title("TTFT that 95 % of the requests of each minute stay below (p95)")
    wait.legend(loc="upper right")
    wait.grid(alpha=0.3, which="both")
    names = [row["fleet"] for row in rows]
    bars = cost.barh(names, [row["gpu_hours"] for row in rows], color=["C0", "C1", "C2"])
    labels = [f"{r['gpu_hours']:.0f} GPU hours, {r['good']:.1%} within {GOAL:g} s" for r in rows]
    cost.bar_label(bars, labels, padding=4)
    cost.set(title="Cost, and requests within the goal", xlabel="GPU hours")
    cost.set_xlim(0, 1.6 * max(row["gpu_hours"] for row in rows))
    cost.invert_yaxis()
    figure.savefig(path, format="png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    arrivals = superposed(read_trace(args.traces / AZURE.trace), args.copies, Random(0))
    rows = compare(arrivals, args.copies, args.processes)
    found = {"copies": args.copies, "requests": len(arrivals), "goal": GOAL, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "autoscaling.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(rows, args.out / "autoscaling.png")


if __name__ == "__main__":
    main()
