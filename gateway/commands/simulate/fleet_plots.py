"""Simulated fleets as plots: latencies by router, and the fleet over time."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from engine.simulated.figures import MEASURES
from engine.simulated.fleet.figures import FleetFigures

_POINTS = ("p50", "p90", "p99")
_OVER_TIME = {
    "active": "replicas that take requests",
    "waiting_tokens": "tokens that wait, all replicas",
    "most_live": "requests of the fullest replica",
}


def draw_fleets(runs: Sequence[FleetFigures], path: Path) -> None:
    """Plot the percentiles of TTFT, ITL and JCT of each run, and its state over time, as a PNG."""
    figure = Figure(figsize=(14, 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3)
    width = 0.8 / len(runs)
    for axes, measure in zip(panels[0], ("ttft", "itl", "jct"), strict=True):
        for number, run in enumerate(runs):
            places = [at + number * width for at in range(len(_POINTS))]
            values = [run.at(measure, point) or 0.0 for point in _POINTS]
            bars = axes.bar(places, values, width, label=run.label, color=f"C{number}")
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_xticks([at + 0.4 - width / 2 for at in range(len(_POINTS))], _POINTS)
        axes.set(title=f"{MEASURES[measure]} of all requests", ylabel="seconds", yscale="log")
    for axes, (name, title) in zip(panels[1], _OVER_TIME.items(), strict=True):
        for number, run in enumerate(runs):
            times = [moment.at / 60.0 for moment in run.moments]
            values = [getattr(moment, name) for moment in run.moments]
            axes.plot(times, values, label=run.label, color=f"C{number}", linewidth=1.0)
        axes.set(title=title, xlabel="minutes")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.savefig(path, format="png", dpi=110)
