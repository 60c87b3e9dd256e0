"""Simulated runs as plots over load and over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine.simulated.figures import MEASURES, Figures


def by_label(runs: Sequence[Figures]) -> dict[str, list[Figures]]:
    """The runs of each label, in order of load."""
    series: dict[str, list[Figures]] = {}
    for run in sorted(runs, key=lambda run: run.offered):
        series.setdefault(run.label, []).append(run)
    return series


def draw_load(series: Mapping[str, Sequence[Figures]], path: Path) -> None:
    """Plot latencies (solid p50, dashed p99), goodput and preemptions over load."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    panels = figure.subplots(2, 3)
    for axes, measure in zip(panels.flat[:4], ("ttft", "itl", "norm", "jct"), strict=True):
        for number, (label, runs) in enumerate(series.items()):
            _over_load(axes, runs, measure, label, f"C{number}")
        axes.set(title=MEASURES[measure], ylabel="seconds", yscale="log")
    for label, runs in series.items():
        load = [run.offered for run in runs]
        panels[1, 1].plot(load, [run.goodput for run in runs], marker=".", label=label)
        shares = [run.num_preempted / max(1, run.num_arrived) for run in runs]
        panels[1, 2].plot(load, shares, marker=".", label=label)
    panels[1, 1].set(title="goodput within the SLO", ylabel="requests/s")
    panels[1, 2].set(title="preemptions per request")
    for axes in panels.flat:
        axes.set_xlabel("requests/s offered")
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.savefig(path, dpi=110)


def _over_load(axes: Axes, runs: Sequence[Figures], measure: str, label: str, colour: str) -> None:
    load = [run.offered for run in runs]
    for point, style in (("p50", "-"), ("p99", "--")):
        values = [run.at(measure, point) or float("nan") for run in runs]
        axes.plot(
            load, values, style, marker=".", color=colour, label=label if style == "-" else None
        )


def draw_time(runs: Sequence[Figures], path: Path) -> None:
    """Plot queue, admitted requests, used slots and preemptions over time."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    titles = {
        "waiting": "requests waiting",
        "admitted": "requests with KV",
        "held_slots": "slots in use",
        "preempted": "preemptions so far",
    }
    for axes, (name, title) in zip(panels.flat, titles.items(), strict=True):
        for run in runs:
            times = [moment.at for moment in run.moments]
            values = [getattr(moment, name) for moment in run.moments]
            axes.plot(times, values, label=f"{run.label}, {run.offered:.3g}/s")
        axes.set(title=title, xlabel="seconds")
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.savefig(path, dpi=110)
