"""The plot of `podway plan`: each goal's latency over the number of GPUs, and the limit."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from engine.simulated.figures import MEASURES
from engine.simulated.fleet.plan import Goals, Plan


def draw_plans(plans: Mapping[str, Plan], goals: Goals, gpus: int, path: Path) -> None:
    """Draw a panel for each goal as a PNG; a star marks the fewest GPUs that meet all goals."""
    count = len(goals.limits)
    figure = Figure(figsize=(max(7, 5 * count), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, goal in zip(panels, goals.limits, strict=True):
        for number, (label, plan) in enumerate(plans.items()):
            counts = sorted(plan.runs)
            values = [plan.runs[at].at(goal.measure, goal.point) for at in counts]
            sizes, colour = [at * gpus for at in counts], f"C{number}"
            axes.plot(sizes, values, marker=".", color=colour, label=label)
            if plan.replicas is not None:
                best = plan.runs[plan.replicas].at(goal.measure, goal.point)
                axes.plot(plan.replicas * gpus, best, "*", color=colour, markersize=14)
                text = f"{plan.replicas * gpus} GPUs"
                axes.annotate(text, (plan.replicas * gpus, best or 0.0), xytext=(6, 6),
                              textcoords="offset points", color=colour)  # fmt: skip
        axes.axhline(goal.seconds, color="black", linestyle="--", linewidth=1.0)
        axes.annotate("goal", (0.01, goal.seconds), xycoords=("axes fraction", "data"),
                      xytext=(0, 3), textcoords="offset points")  # fmt: skip
        title = f"{MEASURES[goal.measure]}, {goal.point}"
        axes.set(title=title, xlabel="GPUs", ylabel="seconds", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(ScalarFormatter())
        axes.grid(alpha=0.3, which="both")
    panels[0].legend()
    figure.savefig(path, format="png", dpi=110)
