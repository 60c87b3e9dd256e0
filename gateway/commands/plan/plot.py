"""The plot of `podway plan`: each goal's latency over the number of GPUs, and the limit."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from engine.research.fleet.plan import Goals, Plan
from engine.simulated.figures import MEASURES


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
