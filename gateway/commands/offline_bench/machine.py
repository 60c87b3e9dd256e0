"""The machine's limits, measured in a process of their own, so that this one never loads torch."""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import orjson

from engine.errors import StartupError
from gateway.commands.offline_bench.roofline import Limit


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
