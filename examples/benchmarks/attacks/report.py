"""The figures of an attack, and its row of the Markdown table."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Figures = dict[str, Any]
COLUMNS = (
    "attack",
    "ITL undisturbed, p50 / p99 ms",
    "beside the attack",
    "ratio of p99: median (min to max)",
    "beside as much ordinary load",
    "ratio of p99 to that",
    "memory, MiB",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def quantiles(gaps: Sequence[float]) -> Figures:
    """Milliseconds; `gaps` are sorted seconds."""
    at = {f"p{q}": gaps[min(len(gaps) - 1, len(gaps) * q // 100)] for q in (50, 90, 99)}
    return {name: round(1e3 * gap, 2) for name, gap in at.items()} | {"chunks": len(gaps)}


def ratios(result: Figures, to: str) -> list[float]:
    """The p99 beside the attack over that of the same round without it (or beside the ordinary
    load), in ascending order."""
    pairs = zip(result["attacked"], result[to], strict=True)
    return sorted(attacked["p99"] / other["p99"] for attacked, other in pairs)


def row(name: str, result: Figures) -> str:
    """A row of the Markdown table; each latency is the median of the rounds."""
    cells = [
        name,
        _latencies(result["undisturbed"]),
        _latencies(result["attacked"]),
        _spread(result, "undisturbed"),
        *(
            (_latencies(result["control"]), _spread(result, "control"))
            if "control" in result
            else ("", "")
        ),
        f"{result['rss_before_mib']:.0f} → {result['rss_after_mib']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _spread(result: Figures, to: str) -> str:
    found = ratios(result, to)
    return f"{median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"


def _latencies(rounds: Sequence[Figures]) -> str:
    p50, p99 = (median(each[name] for each in rounds) for name in ("p50", "p99"))
    return f"{p50:.1f} / {p99:.1f}"


def write_table(page: str, results: Mapping[str, Figures]) -> str:
    """The page with these results instead of its first table."""
    lines = page.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("|"))
    behind = next(at for at in range(first, len(lines)) if not lines[at].startswith("|"))
    table = [HEAD, *(row(name, result) for name, result in results.items())]
    return "\n".join([*lines[:first], *table, *lines[behind:]]) + "\n"
