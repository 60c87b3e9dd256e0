"""The machine's limits, measured in a process of their own, so that this one never loads torch."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson

from engine.errors import StartupError
from gateway.commands.offline_bench.roofline import Limit


def torch_device(described: str) -> str:
    """The torch device of a worker's described device: "cuda:0 (NVIDIA H200)" is "cuda:0"."""
    return described.partition(" ")[0]


async def measure_limits(device: str, threads: int) -> Mapping[str, Limit]:
    """Limits by name: `read` in bytes per second, data types in operations per second.

    `device` is a torch device, or a worker's described one.
    Raises `StartupError` if the measurement fails.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "engine.worker.roofline", torch_device(device), str(threads)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": _import_path()},
    )
    try:
        out, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no error message"]
        raise StartupError(f"the limits of {device} could not be measured: {lines[-1]}")
    return {name: Limit(*limit) for name, limit in orjson.loads(out).items()}


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
