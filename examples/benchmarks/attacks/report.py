"""The figures of an attack, and its row of the Markdown table."""

from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]
COLUMNS = (
    "attack",
    "ITL undisturbed, p50 / p99 ms",
    "beside the attack",
    "ratio",
    "beside as much ordinary load",
    "memory, MiB",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def quantiles(gaps: Sequence[float]) -> Figures:
    """Milliseconds; `gaps` are sorted seconds."""
    at = {f"p{q}": gaps[min(len(gaps) - 1, len(gaps) * q // 100)] for q in (50, 90, 99)}
    return {name: round(1e3 * gap, 2) for name, gap in at.items()} | {"chunks": len(gaps)}


def row(name: str, result: Figures) -> str:
    """A row of the Markdown table."""
    calm, attack, control = result["undisturbed"], result["attacked"], result.get("control")
    cells = [
        name,
        f"{calm['p50']:.1f} / {calm['p99']:.1f}",
        f"{attack['p50']:.1f} / {attack['p99']:.1f}",
        f"{attack['p50'] / calm['p50']:.1f} / {attack['p99'] / calm['p99']:.1f}",
        "" if control is None else f"{control['p50']:.1f} / {control['p99']:.1f}",
        f"{result['rss_before_mib']:.0f} → {result['rss_after_mib']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"
