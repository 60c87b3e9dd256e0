"""The plot of one or more load runs."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gateway.commands.bench.report import MEASURES, Report

_PANELS = ("ttft", "itl", "norm")


def draw(reports: Sequence[Report], path: Path) -> None:
    """Plot three distributions and the output tokens over time, one colour per run."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    *panels, timeline = figure.subplots(2, 2).flat
    for axes, measure in zip(panels, _PANELS, strict=True):
        _distribution(axes, reports, measure)
    for report in reports:
        seconds = [0.0] + [at for at, _ in report.ended]
        tokens = [0, *accumulate(count for _, count in report.ended)]
        timeline.step(seconds, tokens, where="post", label=report.label)
    timeline.set(title="completed requests", xlabel="seconds", ylabel="output tokens")
    timeline.legend()
    figure.savefig(path, dpi=120)


def _distribution(axes: Axes, reports: Sequence[Report], measure: str) -> None:
    """Plot the percentage of samples (y) up to a time (x, milliseconds, logarithmic)."""
    for report in reports:
        if values := report.quantiles[measure]:
            milliseconds = [max(value * 1e3, 1e-3) for value in values]
            axes.plot(milliseconds, range(101), label=report.label)
    unit = "ms/token" if measure == "norm" else "ms"
    axes.set(title=MEASURES[measure], xlabel=unit, ylabel="% of samples", xscale="log")
    axes.grid(alpha=0.3)
