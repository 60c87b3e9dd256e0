"""The figures of a worker alone: rows beside their floors, as a table or as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from engine.step import WorkerReport
from gateway.commands.offline_bench.roofline import Limit, LowerBound, Work, weights_of


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One kind of step. `seconds` is what it takes: the worker's own time, or the pace of results
    where the next step is in flight already."""

    kind: str
    work: Work
    seconds: float
    pace: float
    worker: float
    num_steps: int
    floor: LowerBound

    @property
    def tokens_per_second(self) -> float:
        return self.work.num_requests * self.work.num_tokens / self.seconds

    @property
    def fraction(self) -> float:
        """Of the limit: 1 would be the machine's best."""
        return self.floor.seconds / self.seconds

    def figures(self) -> dict[str, Any]:
        """All of it for JSON, with what follows from it."""
        return {
            "kind": self.kind,
            **self.work._asdict(),
            "seconds": self.seconds,
            "pace_seconds": self.pace,
            "worker_seconds": self.worker,
            "num_steps": self.num_steps,
            "floor_read_seconds": self.floor.reading,
            "floor_compute_seconds": self.floor.computing,
            "bound": self.floor.bound,
            "fraction": self.fraction,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """One run; `limits` are the best that was seen before and after the steps."""

    shape: str
    worker: WorkerReport
    in_flight: int
    limits: Mapping[str, Limit]
    rows: Sequence[BenchRow]
    load: tuple[float, ...]  # the system's, over one minute, before and after

    def write(self, path: Path) -> None:
        """As JSON."""
        limits = {name: limit._asdict() for name, limit in self.limits.items()}
        figures = {
            "shape": self.shape,
            "worker": asdict(self.worker),
            "in_flight": self.in_flight,
            "limits": limits,
            "rows": [row.figures() for row in self.rows],
            "load": self.load,
        }
        path.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))

    @property
    def title(self) -> str:
        """What ran on what, in a line."""
        found = self.worker
        return (
            f"{self.shape}: {found.num_parameters / 1e6:,.0f} M parameters, {found.dtype} with "
            f"{found.weights} weights on {found.device}, {found.threads} threads, "
            f"attention {found.attention}, {found.bytes_per_block / found.block_size:,.0f} bytes "
            f"of {found.kv_dtype} KV a token"
        )

    @property
    def limits_line(self) -> str:
        """The limits that the rows are held against."""
        read, *rates = (self.limits[name] for name in dict.fromkeys(("read", *self._formats)))
        said = [f"{read.rate / 1e9:,.1f} GB/s read ({read.by})"]
        for name, limit in zip(dict.fromkeys(self._formats), rates, strict=True):
            said.append(f"{limit.rate / 1e9:,.0f} G{name} operations/s ({limit.by})")
        return "limits: " + ", ".join(said)

    @property
    def _formats(self) -> tuple[str, str]:
        return weights_of(self.worker), self.worker.dtype


COLUMNS = ("step", "requests", "tokens", "ms", "tokens/s", "floor ms", "bound by", "of the limit")


def cells(row: BenchRow) -> tuple[str, ...]:
    """A line of the table."""
    tokens = f"at {row.work.context:,}" if row.kind == "decode" else f"{row.work.num_tokens:,}"
    return (
        row.kind,
        f"{row.work.num_requests}",
        tokens,
        f"{row.seconds * 1e3:,.2f}",
        f"{row.tokens_per_second:,.1f}",
        f"{row.floor.seconds * 1e3:,.2f}",
        row.floor.bound,
        f"{row.fraction:.0%}",
    )


def show(report: OfflineReport, console: Console) -> None:
    """The table with what it was measured on."""
    console.print(report.title, markup=False, highlight=False)
    console.print(report.limits_line, markup=False, highlight=False)
    table = Table(*COLUMNS, header_style="bold", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(*cells(row))
    console.print(table)
