"""Simulated fleets as plots: latencies by router, and the fleet over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from engine.research.fleet.figures import FleetFigures
from engine.simulated.figures import MEASURES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = ("p50", "p90", "p99")
_UNITS = {"ttft": ("seconds", 1.0), "itl": ("milliseconds", 1e3), "jct": ("seconds", 1.0)}
_OVER_TIME = {
    "active": "Replicas that take requests",
    "waiting_tokens": "Tokens that wait for KV memory, all replicas (mean of a minute)",
    "most_live": "Requests of the replica that has most (mean of a minute)",
}


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
