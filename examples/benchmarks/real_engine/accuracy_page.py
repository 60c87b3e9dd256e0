"""The page and the plot of `simulator_accuracy`, from what its `figures.json` has, and the tables
of earlier runs, which are kept beside it as `run_*.json`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EARLIER_RUN = "earlier run"
BEST = "with the pace"
KNOWN = "pace known"
SHOWN = 40.0  # %; larger errors are written at the edge of the plot
GOALS = {"p50": 0.05, "p99": 0.10, "throughput": 0.02}
Row = Mapping[str, Any]


def goal_of(quantity: str) -> float:
    return GOALS[quantity.split()[-1]]


def table(rows: Sequence[Row]) -> str:
    """A line for each load and quantity: measured, and the error of each prediction."""
    lines: list[str] = []
    for row in rows:
        names, errors = list(row["errors"]), row["errors"]
        if not lines:
            lines.append(f"| load | | measured | {' | '.join(names)} | goal |")
            lines.append("|" + "---|" * (4 + len(names)))
        load = f"| {row['load']:.0%} "
        for quantity in errors[names[0]].get("quantities", ()):
            found = [errors[name]["quantities"][quantity] for name in names]
            unit = "tokens/s" if quantity == "throughput" else "ms"
            cells = [f"{one['error']:+.1%}{_interval(one)}" for one in found]
            measured = f"{found[0]['measured']:.4g} {unit}"
            cells = [quantity, measured, *cells, f"{goal_of(quantity):.0%}"]
            lines.append(f"{load}| {' | '.join(cells)} |")
        if "load" in errors[names[0]]:
            cells = [f"{errors[name]['load']:+.1%}" for name in names]
            lines.append(f"{load}| load with the same mean JCT | | {' | '.join(cells)} | |")
        cells = [f"{errors[n]['steps']['sum']:+.1%}" for n in names]
        lines.append(f"{load}| time of all steps | | {' | '.join(cells)} | |")
    return "\n".join(lines)


def _interval(one: Mapping[str, float]) -> str:
    return f" ± {one['interval']:.1%}" if one["interval"] else ""


def earlier(directory: Path) -> list[Mapping[str, Any]]:
    """The earlier runs in a directory."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("run_*.json"))]


def report(found: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page; `others` are earlier runs."""
    saturated = found["saturated"]
    most = saturated["measured"]
    ratios = ", ".join(
        f"{value / most - 1.0:+.1%} ({name})"
        for name, value in saturated.items()
        if name != "measured"
    )
    counts = found["rows"][0]["requests"]
    flags = "" if found["size"] == "medium" else f" --size {found['size']}"
    flags += " --clock cpu" * ("--clock cpu" in found["where"])
    return f"""# Predicted and measured

![errors of the simulation, by load and cost model](errors.png)

`python -m examples.benchmarks.real_engine.simulator_accuracy{flags}`: the engine of the server,
requests from the same process without HTTP; a Llama with random weights, {found["model"]};
{counts:,} requests at each load, lengths of the Azure conversation trace divided by
{found["divisor"]}, Poisson arrivals, the same ones in engine and simulation. Loads are shares of
the measured capacity under fcfs ({most:.4g} requests/s). {found["where"]}

ITL is that of a request (TPOT). Intervals (95 %) are from {found["batches"]} batches of consecutive
requests. Cost models: *at the start*, the one that a server measures before it is ready, by single
steps and a trial run of a second through scheduler and event loop; *earlier run*, fitted to the
steps of a run at 60 % load with other arrivals, and to the event loop's time between them; *first
fifth*, the same fit to the first fifth of the run itself, of which the rest is compared; *with the
pace*, the same with the spread of steps of each size in that fifth, and with the speeds of decodes
and of steps with prompts estimated again for each twentieth of the run from the twentieth before
it; *pace known*, the same with the speeds of each twentieth itself, which are known afterwards
only. The fits have no bias on the steps that they are fitted to: an error of *time of all steps* is
the change of the machine's speed since then. What *with the pace* misses beyond *pace known* is the
change of speed from one twentieth to the next; the rest is the simulator's own error and changes
within a twentieth.

{table(found["rows"])}

{misses(found["rows"])}

Capacity: with more requests than it can serve, the engine finishes {most:.4g} requests/s; the
simulation is {ratios} off. Near capacity a small error of the cost becomes a large one of
latencies, so there the error is given in load: the change of the arrival rate at which the
simulation has the measured mean JCT.

What the simulation leaves out: HTTP, tokenizing and text, the compile time of grammars, lookahead
(off here), and other processes. The time of the event loop between two steps is part of all models
(`idle_step`, `idle_entry`).
{"".join(map(section, others))}"""


def section(found: Mapping[str, Any]) -> str:
    """The table of an earlier run."""
    counts = found["rows"][0]["requests"]
    return f"""
## Another run

{counts:,} requests at each load, a model of {found["model"]}; capacity {found["capacity"]:.4g}
requests/s. {found["where"]}

{table(found["rows"])}

{misses(found["rows"])}
"""


def misses(rows: Sequence[Row]) -> str:
    """The quantities that miss their goal with the pace, and with models that do not follow it."""
    sentences = []
    words_of = {
        EARLIER_RUN: "With the model of an earlier run",
        BEST: "With the pace",
        KNOWN: "If the pace is known",
    }
    for name in (name for name in words_of if name in rows[0]["errors"]):
        missed = [
            f"{quantity} at {row['load']:.0%} load ({one['error']:+.1%})"
            for row in rows
            for quantity, one in row["errors"][name].get("quantities", {}).items()
            if abs(one["error"]) > goal_of(quantity)
        ]
        if missed:
            sentences.append(f"{words_of[name]} these miss their goal: {', '.join(missed)}.")
        else:
            sentences.append(f"{words_of[name]} every quantity is within its goal.")
    return " ".join(sentences)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Plot the error of each quantity with its interval, one panel for each load; the shaded band
    is the goal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in found["rows"] if "quantities" in row["errors"][BEST]]
    figure = Figure(figsize=(7 * max(1, len(rows)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(rows)), squeeze=False)[0]
    for axes, row in zip(panels, rows, strict=False):
        quantities = list(row["errors"][BEST]["quantities"])
        for place, quantity in enumerate(quantities):
            goal = 100 * goal_of(quantity)
            axes.fill_between([place - 0.45, place + 0.45], -goal, goal, color="0.85", zorder=0)
        for number, (name, errors) in enumerate(row["errors"].items()):
            places = [place + 0.17 * (number - 2) for place in range(len(quantities))]
            each = [errors["quantities"][quantity] for quantity in quantities]
            values = [100 * one["error"] for one in each]
            widths = [100 * one["interval"] for one in each]
            axes.errorbar(places, values, widths, fmt="o", capsize=3, label=name)
            for x, value in zip(places, values, strict=True):
                if abs(value) > SHOWN:
                    edge, color = SHOWN if value > 0 else -SHOWN, f"C{number}"
                    axes.annotate(f"{value:+.0f} %", (x, 0.93 * edge), color=color, ha="center")
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(quantities)), quantities, rotation=30)
        title = f"Simulation beside the real engine at {row['load']:.0%} of its capacity"
        axes.set(title=title, ylabel="predicted beside measured, % (grey: the goal)")
        axes.set_ylim(-SHOWN, SHOWN)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), title="cost model")
    figure.savefig(path, format="png", dpi=110)
