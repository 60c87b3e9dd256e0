"""Output tokens per second of each server over the number of concurrent streams, as an SVG.

python -m examples.benchmarks.peers.plot FIGURES.json OUT.svg
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


def draw(rounds: list[dict[str, Any]], path: Path) -> None:
    """One panel per group of servers, one bar per server and closed load, medians of the rounds."""
    groups: dict[str, list[str]] = defaultdict(list)
    for run in rounds:
        if run["server"] not in groups[run["group"]]:
            groups[run["group"]].append(run["server"])
    loads = [name for name in rounds[0]["loads"] if name.startswith("C=")]
    mpl.rcParams["svg.hashsalt"] = "podway"  # the same figures give the same file
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (group, servers) in zip(panels, groups.items(), strict=True):
        width = 0.8 / len(servers)
        for number, server in enumerate(servers):
            rates = [rate(rounds, server, load) for load in loads]
            places = [place + number * width for place in range(len(loads))]
            bars = axes.bar(places, rates, width, label=server)
            axes.bar_label(bars, fmt="%.3g", fontsize=8)
        axes.set(title=group, xticks=[place + 0.4 - width / 2 for place in range(len(loads))])
        axes.set_xticklabels([f"{load[2:]} streams" for load in loads])
        axes.legend(frameon=False)
    panels[0].set_ylabel("output tokens/s")
    figure.savefig(path, format="svg", metadata={"Date": None})


def rate(rounds: list[dict[str, Any]], server: str, load: str) -> float:
    """The median over the rounds."""
    runs = [run for run in rounds if run["server"] == server]
    return median(float(run["loads"][load]["output_rate"]) for run in runs)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
