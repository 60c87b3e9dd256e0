"""Results of `podway bench --offline`: times of steps and their lower bounds, as table or JSON."""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import orjson
from rich.console import Console
from rich.table import Column, Table

from engine.errors import StartupError
from engine.worker_settings import WorkerReport
from gateway.commands.offline_bench.roofline import Limit, LowerBound, Work, weights_of
from gateway.commands.offline_bench.steps import Timing


def torch_device(described: str) -> str:
    """The torch device of a worker's described device: "cuda:0 (NVIDIA H200)" is "cuda:0"."""
    return described.partition(" ")[0]


class Ruler:
    """A process that measures the machine's limits, and then plain reads of memory on request."""

    def __init__(self, device: str, threads: int) -> None:
        """`device` is a torch device, or a worker's described one."""
        self._device, self._threads = device, threads
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "engine.worker.roofline"),
            *(torch_device(self._device), str(self._threads)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": _import_path()},
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def limits(self) -> Mapping[str, Limit]:
        """Limits by name: `read` in bytes per second, data types in operations per second.

        Called once, first. Raises `StartupError` if the measurement fails.
        """
        found = await self._line()
        return {name: Limit(*limit) for name, limit in orjson.loads(found).items()}

    async def read(self, num_bytes: int) -> float:
        """Elapsed seconds of a plain read of so many bytes by all threads; on a CPU only."""
        assert self._process is not None, "the process runs"
        assert self._process.stdin is not None, "the process reads requests"
        self._process.stdin.write(b"%d\n" % num_bytes)
        return float(await self._line())

    async def _line(self) -> bytes:
        assert self._process is not None, "the process runs"
        assert self._process.stdout is not None, "the process prints"
        assert self._process.stderr is not None, "the process reports errors"
        if line := await self._process.stdout.readline():
            return line
        errors = (await self._process.stderr.read()).decode(errors="replace")
        last = (errors.strip().splitlines() or ["no error message"])[-1]
        raise StartupError(f"the limits of {self._device} could not be measured: {last}")


async def measure_limits(device: str, threads: int) -> Mapping[str, Limit]:
    """The limits, measured by a process that then ends. Raises `StartupError`."""
    async with Ruler(device, threads) as ruler:
        return await ruler.limits()


def _import_path() -> str:
    """This process's import path, so that the other process imports the same code."""
    return os.pathsep.join(os.path.abspath(path) for path in sys.path)


def read_limits(path: Path) -> Mapping[str, Limit]:
    """The limits in a file that `--json` wrote. Raises `StartupError` that names the path."""
    try:
        limits = orjson.loads(path.read_bytes())["limits"]
        return {name: Limit(**limit) for name, limit in limits.items()}
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} is not a report of podway bench --offline --json") from error


def best_of(one: Mapping[str, Limit], other: Mapping[str, Limit]) -> dict[str, Limit]:
    """The higher of each limit, since both rates were reached on this machine."""
    return {
        name: max(limit, other[name], key=lambda each: each.rate) for name, limit in one.items()
    }


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One kind of step. `seconds` is the worker's own time, or, if the next step is in flight
    already, the time from one result to the next.

    `num_bytes` are those that a step reads and writes at least.
    """

    kind: str
    work: Work
    seconds: float
    timing: Timing
    num_bytes: int
    lower_bound: LowerBound

    @property
    def tokens_per_second(self) -> float:
        return self.work.num_requests * self.work.num_tokens / self.seconds

    @property
    def fraction(self) -> float:
        """Lower bound over measured time; 1 is the machine's limit.

        With plain reads beside the steps, the fastest step is compared with the fastest read.
        """
        is_beside_reads = self.timing.read is not None
        return self.lower_bound.seconds / (self.timing.fastest if is_beside_reads else self.seconds)

    @property
    def read_rate(self) -> float | None:
        """Bytes per second of the fastest plain read beside the steps."""
        return None if self.timing.read is None else self.num_bytes / self.timing.read

    def figures(self) -> dict[str, Any]:
        """All fields and derived values, for JSON."""
        return {
            "kind": self.kind,
            **self.work._asdict(),
            "seconds": self.seconds,
            "pace_seconds": self.timing.pace,
            "worker_seconds": self.timing.worker,
            "fastest_seconds": self.timing.fastest,
            "num_steps": self.timing.num_steps,
            "num_bytes": self.num_bytes,
            "read_rate": self.read_rate,
            "floor_read_seconds": self.lower_bound.reading,
            "floor_compute_seconds": self.lower_bound.computing,
            "bound": self.lower_bound.bound,
            "fraction": self.fraction,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """One run; `limits` are the best rates measured before and after the steps."""

    shape: str
    worker: WorkerReport
    in_flight: int
    limits: Mapping[str, Limit]
    rows: Sequence[BenchRow]
    load: tuple[float, ...]  # the system's one-minute load average before and after

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        limits = {name: limit._asdict() for name, limit in self.limits.items()}
        figures = {
            "shape": self.shape,
            "worker": _facts(self.worker),
            "in_flight": self.in_flight,
            "limits": limits,
            "rows": [row.figures() for row in self.rows],
            "load": self.load,
        }
        path.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))

    @property
    def title(self) -> str:
        """The model and the worker in one line."""
        worker = self.worker
        token_bytes = worker.bytes_per_block / worker.block_size
        return (
            f"{self.shape}: {worker.num_parameters / 1e6:,.0f} M parameters, {worker.dtype} with "
            f"{worker.weights} weights on {worker.device}, {worker.threads} threads, "
            f"attention {worker.attention}, {token_bytes:,.0f} bytes of {worker.kv_dtype} KV "
            "per token"
        )

    @property
    def limits_line(self) -> str:
        """The limits that the rows are compared with, in one line."""
        read, *rates = (self.limits[name] for name in dict.fromkeys(("read", *self._formats)))
        parts = [f"{read.rate / 1e9:,.1f} GB/s read, at best ({read.by})"]
        for name, limit in zip(dict.fromkeys(self._formats), rates, strict=True):
            parts.append(f"{limit.rate / 1e9:,.0f} G{name} operations/s ({limit.by})")
        return "limits: " + ", ".join(parts)

    @property
    def _formats(self) -> tuple[str, str]:
        return weights_of(self.worker), self.worker.dtype


COLUMNS = (
    *("step", "requests", "tokens", "ms", "tokens/s", "GB/s"),  # GB/s of reads beside the steps
    *("minimum ms", "bound by", "of the limit"),
)


def cells(row: BenchRow) -> tuple[str, ...]:
    """A row of the table."""
    tokens = f"at {row.work.context:,}" if row.kind == "decode" else f"{row.work.num_tokens:,}"
    return (
        row.kind,
        f"{row.work.num_requests}",
        tokens,
        f"{row.seconds * 1e3:,.2f}",
        f"{row.tokens_per_second:,.1f}",
        "" if row.read_rate is None else f"{row.read_rate / 1e9:,.1f}",
        f"{row.lower_bound.seconds * 1e3:,.2f}",
        row.lower_bound.bound,
        f"{row.fraction:.0%}",
    )


def show(report: OfflineReport, console: Console) -> None:
    """Print the table under a description of model, worker and limits."""
    console.print(report.title, markup=False, highlight=False)
    console.print(report.limits_line, markup=False, highlight=False)
    first, *others = COLUMNS
    columns = (Column(title, justify="right") for title in others)
    table = Table(first, *columns, header_style="bold", box=None)
    for row in report.rows:
        table.add_row(*cells(row))
    console.print(table)


def _facts(worker: WorkerReport) -> dict[str, object]:
    """The fields of the report that JSON can hold: all but the contents of the disk tier."""
    tiers = asdict(worker.tiers)
    del tiers["disk_hashes"], tiers["disk_state_hashes"]
    return {name: value for name, value in asdict(worker).items() if name != "tiers"} | tiers
