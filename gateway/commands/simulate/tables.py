"""Simulated runs as two tables for the terminal: rates and counts, then latencies."""

from collections.abc import Sequence

from rich.console import Console

from engine.simulated.figures import Figures
from gateway.commands.simulate.fleet import table_of

_LATENCIES = (  # measure, title, unit
    ("ttft", "TTFT\nms", 1e3),
    ("itl", "ITL\nms", 1e3),
    ("norm", "ms/\ntoken", 1e3),
    ("jct", "JCT\ns", 1.0),
)
_WIDE = 120  # characters; a narrower terminal shows mean and p99 only
_COUNTS = (
    "offered\n/s", "done\n/s", "good\n%", "out\ntok/s", "pre-\nempted", "swapped\nout",
    "kslots\nmoved", "peak\nqueue",
)  # fmt: skip


def show(runs: Sequence[Figures], console: Console) -> None:
    """Print a table of rates and counts, then one of latencies; one row per run."""
    points = ("mean", "p50", "p90", "p99") if console.width >= _WIDE else ("mean", "p99")
    columns = [(*latency, point) for latency in _LATENCIES for point in points]
    counts = table_of(*_COUNTS)
    times = table_of(*(f"{title}\n{point}" for _, title, _, point in columns))
    for run in runs:
        counts.add_row(_name(run), *_counts(run))
        times.add_row(_name(run), *(_cell(run, m, unit, point) for m, _, unit, point in columns))
    console.print(counts)
    console.print(times)


def _name(run: Figures) -> str:
    return f"{run.label} @{run.offered:.3g}/s"


def _counts(run: Figures) -> tuple[str, ...]:
    return (
        f"{run.offered:.3g}",
        f"{run.throughput:.3g}",
        f"{100 * run.attainment:.1f}",
        f"{run.output_rate:,.0f}",
        str(run.num_preempted),
        str(run.num_swapped),
        f"{run.swapped_slots / 1e3:,.0f}",
        str(run.peak_waiting),
    )


def _cell(run: Figures, measure: str, unit: float, point: str) -> str:
    value = run.at(measure, point)
    if value is None:
        return "-"
    return f"{value * unit:.0f}" if value * unit >= 100 else f"{value * unit:.3g}"
