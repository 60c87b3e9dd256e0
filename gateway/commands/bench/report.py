"""The results of a load run, computed from the outcomes, then printed or written as JSON.

TTFT: from send to first token. ITL: gaps between events of one stream, over all streams. TPOT: from
first token to finish, divided by (tokens - 1), including tokens without text. JCT: from send to
end. Normalized latency: JCT divided by output tokens (Orca, section 6).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import orjson
from rich.console import Console
from rich.table import Column, Table

from gateway.commands.bench.load import RequestResult
from gateway.commands.http_client import ServerError

MEASURES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "norm": "normalized latency",
    "jct": "JCT",
}
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `quantiles` has, for each measure, its percentiles 0 to 100 in seconds."""

    label: str
    setup: dict[str, Any]
    num_ok: int
    num_failed: int
    wall_seconds: float
    output_tokens: int
    prompt_tokens: int
    counted_by: str
    tokens_per_event: float
    num_short: int  # answers with fewer tokens than requested
    late_seconds: float  # largest delay of a send after its planned time
    quantiles: dict[str, list[float]]
    errors: dict[str, int]
    ended: list[tuple[float, int]]  # (seconds after the start, output tokens) of each, by time

    @property
    def output_rate(self) -> float:
        """Output tokens per second over the whole run."""
        return self.output_tokens / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def total_rate(self) -> float:
        return (
            (self.output_tokens + self.prompt_tokens) / self.wall_seconds
            if self.wall_seconds
            else 0.0
        )

    @property
    def request_rate(self) -> float:
        return self.num_ok / self.wall_seconds if self.wall_seconds else 0.0

    def at(self, measure: str, percentile: int) -> float | None:
        """Seconds, or None if no request succeeded."""
        values = self.quantiles[measure]
        return values[percentile] if values else None

    def write(self, path: Path) -> None:
        """Write the report as JSON, with its rates."""
        rates = {
            "output_tokens_per_second": self.output_rate,
            "total_tokens_per_second": self.total_rate,
            "requests_per_second": self.request_rate,
        }
        path.write_bytes(orjson.dumps(asdict(self) | rates, option=orjson.OPT_INDENT_2))


def summarize(
    outcomes: Sequence[RequestResult], setup: dict[str, Any], label: str, late_seconds: float = 0.0
) -> Report:
    """The report of the requests that succeeded; failed ones are counted by their error."""
    ok = [outcome for outcome in outcomes if outcome.is_ok]
    started_at = min((outcome.sent_at for outcome in outcomes), default=0.0)
    ended_at = max((outcome.ended_at or outcome.sent_at for outcome in outcomes), default=0.0)
    output_tokens = sum(outcome.output_tokens for outcome in ok)
    num_events = sum(outcome.num_events for outcome in ok)
    by_usage = all(outcome.usage_output is not None for outcome in ok)
    ends = sorted(((outcome.ended_at or 0.0) - started_at, outcome.output_tokens) for outcome in ok)
    return Report(
        label=label,
        setup=setup,
        num_ok=len(ok),
        num_failed=len(outcomes) - len(ok),
        wall_seconds=ended_at - started_at,
        output_tokens=output_tokens,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in ok),
        counted_by="the server's usage" if by_usage else "events",
        tokens_per_event=output_tokens / num_events if num_events else 0.0,
        num_short=sum(outcome.output_tokens < outcome.request.output_tokens for outcome in ok),
        late_seconds=late_seconds,
        quantiles={name: _quantiles(values) for name, values in _measures(ok).items()},
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        ended=ends,
    )


def read_report(path: Path) -> Report:
    """Read a file that `Report.write` wrote. Raises `ServerError` that names the path."""
    try:
        fields = orjson.loads(path.read_bytes())
        return Report(**{name: fields[name] for name in Report.__dataclass_fields__})
    except OSError as error:
        raise ServerError(f"cannot read {path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ServerError(f"{path} is not a report of podway bench --json") from error


def show(reports: Sequence[Report], console: Console) -> None:
    """Print a table with one column per run, then the errors."""
    columns = (Column(report.label, justify="right") for report in reports)
    table = Table("", *columns, header_style="bold", box=None)
    for title, cells in _rows(reports):
        table.add_row(title, *cells)
    console.print(table)
    for report in reports:
        for error, count in report.errors.items():
            console.print(f"{report.label}: {count} × {error}", markup=False, highlight=False)


def _rows(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    rows = [
        ("requests ok / failed", [f"{r.num_ok} / {r.num_failed}" for r in reports]),
        ("seconds", [f"{r.wall_seconds:.1f}" for r in reports]),
        ("requests/s", [f"{r.request_rate:.2f}" for r in reports]),
        ("output tokens/s", [f"{r.output_rate:.1f}" for r in reports]),
        ("all tokens/s", [f"{r.total_rate:.1f}" for r in reports]),
        ("tokens in / out", [f"{r.prompt_tokens} / {r.output_tokens}" for r in reports]),
        ("counted by", [r.counted_by for r in reports]),
        ("tokens per event", [f"{r.tokens_per_event:.2f}" for r in reports]),
        ("answers cut short", [str(r.num_short) for r in reports]),
        ("largest send delay, ms", [f"{r.late_seconds * 1e3:.1f}" for r in reports]),
    ]
    for measure, title in MEASURES.items():
        unit = "ms/token" if measure == "norm" else "ms"
        cells = [" / ".join(_ms(r.at(measure, p)) for p in _PERCENTILES) for r in reports]
        rows.append((f"{title} {unit} p50 / p90 / p99", cells))
    return rows


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _measures(ok: Sequence[RequestResult]) -> dict[str, list[float]]:
    """All samples of each measure, in seconds."""
    samples: dict[str, list[float]] = {name: [] for name in MEASURES}
    for outcome in ok:
        assert outcome.first_at is not None
        assert outcome.finished_at is not None
        assert outcome.ended_at is not None, "a request that succeeded has all its times"
        jct = outcome.ended_at - outcome.sent_at
        samples["ttft"].append(outcome.first_at - outcome.sent_at)
        samples["itl"].extend(outcome.gaps)
        samples["jct"].append(jct)
        samples["norm"].append(jct / max(1, outcome.output_tokens))
        if outcome.output_tokens > 1:
            samples["tpot"].append(
                (outcome.finished_at - outcome.first_at) / (outcome.output_tokens - 1)
            )
    return samples


def _quantiles(values: Sequence[float]) -> list[float]:
    """Percentiles 0 to 100 with linear interpolation; empty for no samples."""
    if len(values) < 2:
        return [*values] * 101
    return [min(values), *quantiles(values, n=100, method="inclusive"), max(values)]
