"""The machine's limits, measured in a process of their own: torch is never loaded in this one."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson

from engine.errors import StartupError
from gateway.commands.offline_bench.roofline import Limit


async def measure_limits(device: str, threads: int) -> Mapping[str, Limit]:
    """By name: `read` in bytes a second, formats of numbers in operations a second.

    Raises `StartupError` where the measurement fails.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "engine.worker.roofline", device, str(threads)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": _our_path()},
    )
    try:
        out, complaints = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        said = complaints.decode(errors="replace").strip().splitlines() or ["nothing was said"]
        raise StartupError(f"the limits of {device} could not be measured: {said[-1]}")
    return {name: Limit(*found) for name, found in orjson.loads(out).items()}


def _our_path() -> str:
    """So that the other process imports the same code."""
    return os.pathsep.join(os.path.abspath(path) for path in sys.path)


def read_limits(path: Path) -> Mapping[str, Limit]:
    """Those of a run that `--json` wrote; raises `StartupError` with the path."""
    try:
        found = orjson.loads(path.read_bytes())["limits"]
        return {name: Limit(**limit) for name, limit in found.items()}
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} was not written by podway bench --offline") from error


def best_of(one: Mapping[str, Limit], other: Mapping[str, Limit]) -> dict[str, Limit]:
    """The higher of each: a machine can do at least what it has done."""
    return {
        name: max(limit, other[name], key=lambda each: each.rate) for name, limit in one.items()
    }
