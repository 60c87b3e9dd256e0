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
    "TTFT of a short request, p50 / p90 ms",
    "beside the attack",
    "ratio of p90",
    "beside as much ordinary load",
    "ratio of p99 to that",
    "memory, MiB",
)


def quantiles(gaps: Sequence[float]) -> Figures:
    """Milliseconds; `gaps` are sorted seconds, {} without any."""
    if not gaps:
        return {}
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
        *_short_requests(result),
        *(
            (_latencies(result["control"]), _spread(result, "control"))
            if "control" in result
            else ("", "")
        ),
        f"{result['rss_before_mib']:.0f} → {result['rss_after_mib']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _short_requests(result: Figures) -> tuple[str, str, str]:
    """Their times to the first token, and the ratio; empty where they were not measured."""
    sides = [[r["ttft"] for r in result[to] if r.get("ttft")] for to in ("undisturbed", "attacked")]
    if not all(sides):
        return "", "", ""
    before, beside = sides
    ratio = median(r["p90"] for r in beside) / median(r["p90"] for r in before)
    return _latencies(before, "p90"), _latencies(beside, "p90"), f"{ratio:.1f}"


def _spread(result: Figures, to: str) -> str:
    found = ratios(result, to)
    return f"{median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"


def _latencies(rounds: Sequence[Figures], upper: str = "p99") -> str:
    """Medians of the rounds of the p50 and an upper quantile."""
    middle, high = (median(each[name] for each in rounds) for name in ("p50", upper))
    return f"{middle:.1f} / {high:.1f}"


def write_table(page: str, results: Mapping[str, Figures]) -> str:
    """The page with these results instead of its first table of attacks."""
    return replace_rows(page, COLUMNS, [row(name, result) for name, result in results.items()])


def table_head(columns: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def replace_rows(page: str, columns: Sequence[str], rows: Sequence[str]) -> str:
    """The page with these rows in the first table that has these columns."""
    before, head, rest = page.partition(table_head(columns) + "\n")
    lines = rest.splitlines(keepends=True)
    behind = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    assert head, f"the page has no table with the columns {columns}"
    return before + head + "".join(f"{row}\n" for row in rows) + "".join(lines[behind:])
