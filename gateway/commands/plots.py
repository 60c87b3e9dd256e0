"""Plots of simulated runs over load and over time, of fleets, and of `podway plan`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from engine.research.fleet.figures import FleetFigures
from engine.research.fleet.plan import Goals, Plan
from engine.simulated.figures import MEASURES, Figures

_POINTS = ("p50", "p90", "p99")
_UNITS = {"ttft": ("seconds", 1.0), "itl": ("milliseconds", 1e3), "jct": ("seconds", 1.0)}
_OVER_TIME = {
    "active": "Replicas that take requests",
    "waiting_tokens": "Tokens that wait for KV memory, all replicas (mean of a minute)",
    "most_live": "Requests of the replica that has most (mean of a minute)",
}


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


def draw_fleets(runs: Sequence[FleetFigures], path: Path) -> None:
    """Plot the percentiles of TTFT, ITL and JCT of each run, and its state over time.
    The number of replicas is shown if it changes in any run."""
    is_scaled = any(len({moment.active for moment in run.moments}) > 1 for run in runs)
    over_time = {name: text for name, text in _OVER_TIME.items() if name != "active" or is_scaled}
    figure = Figure(figsize=(14, 8.5), layout="constrained")
    grid = figure.add_gridspec(2, 6)
    labels = _labels(runs)
    for place, measure in enumerate(_UNITS):
        axes = figure.add_subplot(grid[0, 2 * place : 2 * place + 2])
        _draw_latencies(axes, measure, runs, labels)
    width = 6 // len(over_time)
    for place, (name, title) in enumerate(over_time.items()):
        axes = figure.add_subplot(grid[1, width * place : width * (place + 1)])
        for number, run in enumerate(runs):
            axes.plot(*_by_minute(run, name), color=f"C{number}")
        axes.set(title=title, xlabel="minutes since the first request")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(runs), title="router")
    figure.savefig(path, dpi=110)


def _labels(runs: Sequence[FleetFigures]) -> list[str]:
    """The labels of the runs, without the policy if all have the same."""
    parts = [run.label.split(" × ") for run in runs]
    has_one_policy = len({tuple(part[1:]) for part in parts}) == 1
    return [part[0] if has_one_policy else run.label for part, run in zip(parts, runs, strict=True)]


def _draw_latencies(
    axes: "Axes", measure: str, runs: Sequence[FleetFigures], labels: Sequence[str]
) -> None:
    """Bars of one latency: a group for each percentile, a bar for each run."""
    unit, factor = _UNITS[measure]
    width = 0.8 / len(runs)
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        places = [at + number * width for at in range(len(_POINTS))]
        values = [factor * (run.at(measure, point) or 0.0) for point in _POINTS]
        bars = axes.bar(places, values, width, label=label, color=f"C{number}")
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(_POINTS))], _POINTS)
    axes.set(title=f"{MEASURES[measure]} of all requests (lower is better)", yscale="log")
    axes.set_ylabel(f"{unit} (logarithmic)")
    axes.yaxis.set_major_formatter(ScalarFormatter())


def _by_minute(run: FleetFigures, name: str) -> tuple[list[float], list[float]]:
    """The middle of each minute, and the mean of the samples in it."""
    minutes: dict[int, list[float]] = {}
    for moment in run.moments:
        minutes.setdefault(int(moment.at / 60.0), []).append(getattr(moment, name))
    return [at + 0.5 for at in minutes], [float(numpy.mean(each)) for each in minutes.values()]


def draw_plans(plans: Mapping[str, Plan], goals: Goals, gpus: int, path: Path) -> None:
    """Draw a panel for each goal; a star marks the fewest GPUs that meet all goals."""
    count = len(goals.limits)
    figure = Figure(figsize=(max(7, 5 * count), 5), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, goal in zip(panels, goals.limits, strict=True):
        for number, (label, plan) in enumerate(plans.items()):
            counts = sorted(plan.runs)
            values = [plan.runs[at].at(goal.measure, goal.point) for at in counts]
            sizes, colour = [at * gpus for at in counts], f"C{number}"
            axes.plot(sizes, values, marker=".", color=colour, label=_text(label, plan, gpus))
            if plan.replicas is not None:
                best = plan.runs[plan.replicas].at(goal.measure, goal.point)
                axes.plot(plan.replicas * gpus, best, "*", color=colour, markersize=14)
        axes.axhline(goal.seconds, color="black", linestyle="--", linewidth=1.0)
        axes.annotate(f"goal: at most {goal.seconds:g} s", (0.99, goal.seconds), ha="right",
                      xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points")  # fmt: skip
        title = f"{MEASURES[goal.measure]}, {goal.point}"
        axes.set(title=title, xlabel="GPUs", ylabel="seconds", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(ScalarFormatter())
        axes.grid(alpha=0.3, which="both")
    handles, names = panels[0].get_legend_handles_labels()
    title = "★: the fewest GPUs with which all goals are met"
    figure.legend(handles, names, loc="outside upper center", ncols=min(4, len(plans)), title=title)
    figure.savefig(path, dpi=110)


def _text(label: str, plan: Plan, gpus: int) -> str:
    """The router or setup, and the GPUs that it needs."""
    if plan.replicas is None:
        return f"{label}: goals not met"
    return f"{label}: {plan.replicas * gpus} GPUs"
