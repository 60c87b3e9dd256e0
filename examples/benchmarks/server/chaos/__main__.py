"""A real server under mixed load while something fails every few seconds.

    python -m examples.benchmarks.server.chaos [--hours 1] [--rate 6] [--every 4] [--record]
                                               [--out DIR] [-- FLAGS OF podway serve]

Chats, completions, several choices, JSON schemas, tool calls and LoRA adapters, with speculation,
swapping and the disk tier; clients that hang up, stall and retry. Each request has one answer,
which is learned before anything fails. Exits with 1 if an answer differs or is missing, or if a KV
block, a descriptor, a thread or a process is left. Memory is reported as a slope over the second
half of the run with its interval of 95 %. With --record there is no speculation, since recordings
have no drafts, and the run must be followed by `podway simulate` in the end.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
import psutil

from examples.benchmarks.server.chaos.faults import WORKER, Faults
from examples.benchmarks.server.chaos.load import Clients, Tally
from examples.benchmarks.server.chaos.requests import catalogue
from examples.benchmarks.server.served import serving, until_idle
from tests.models.builtin_loras import builtin_lora

FLAGS = (
    *("--kv-slots", "4096", "--host-kv-memory", "16MiB", "--disk-kv-memory", "64MiB"),
    *("--swap", "proactive", "--cost-model", "none", "--lookahead", "1", "--max-restarts", "50"),
)
SPECULATION = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
SERVED_LORAS, PASSING_LORA = ("first", "second"), "third"
LORAS = (*SERVED_LORAS, PASSING_LORA)
KEY = "sk-chaos-0123456789abcdef"
MIB = 1 << 20
WARM_UP = 0.1  # the share of the run before the first sample counts
SAMPLES = 200


class Sample(NamedTuple):
    """The server's processes at a moment of the run; seconds since its begin."""

    at: float
    server_bytes: int  # private memory
    worker_bytes: int
    descriptors: int  # of the server's process
    threads: int
    processes: int


@dataclass
class Result:
    """A run of so many seconds."""

    seconds: float
    tally: Tally
    faults: dict[str, int] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    before: Sample | None = None  # idle, when all answers were learned
    after: Sample | None = None  # idle, at the end
    problems: list[str] = field(default_factory=list)


def sample(server: psutil.Process, began: float) -> Sample:
    """The processes, now; memory of a worker that is just starting counts as 0."""
    children = server.children(recursive=True)
    workers = [child for child in children if child.name() == WORKER]
    return Sample(
        time.monotonic() - began,
        server.memory_full_info().uss,
        sum(worker.memory_full_info().uss for worker in workers),
        server.num_fds(),
        server.num_threads(),
        1 + len(children),
    )


async def run(
    server: psutil.Process, url: str, folder: Path, arguments: argparse.Namespace
) -> Result:
    """Learn the answers, then load and faults side by side; ends when the server is idle."""
    seconds, chance = arguments.hours * 3600, random.Random(arguments.seed)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=180)
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        clients = Clients(session, url, catalogue(SERVED_LORAS), arguments.seed)
        await clients.learn()
        await until_idle(session, url)
        began = time.monotonic()
        faults = Faults(server, session, url, folder / PASSING_LORA)
        result = Result(seconds, clients.tally, before=sample(server, began))
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(server, began, seconds / SAMPLES, result.samples))
            causing = tasks.create_task(faults.run(arguments.every, seconds, chance))
            await clients.run(arguments.rate, seconds)
            await causing
            watching.cancel()
        result.faults = dict(faults.counts)
        await _check_idle(session, url, server, began, result)
    return result


async def _watch(server: psutil.Process, began: float, every: float, samples: list[Sample]) -> None:
    while True:
        await asyncio.sleep(every)
        try:
            samples.append(sample(server, began))
        except psutil.NoSuchProcess:  # a worker that was just killed
            continue


async def _check_idle(
    session: aiohttp.ClientSession, url: str, server: psutil.Process, began: float, result: Result
) -> None:
    counts = await until_idle(session, url)
    assert result.before is not None, "measured before the load"
    result.after = after = sample(server, began)
    held = counts['podway_kv_slots{state="held",tier="device"}']
    for what, count in (("orphan blocks", counts["podway_orphan_blocks"]), ("KV slots", held)):
        if count:
            result.problems.append(f"{count:g} {what} are left")
    for name in ("descriptors", "threads", "processes"):
        # one connection to /metrics is open, and the grammar process may have started since
        if getattr(after, name) > getattr(result.before, name) + 2:
            was = getattr(result.before, name)
            result.problems.append(f"{name}: {was} before, {getattr(after, name)} after")


def slope(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Bytes per hour over the second half of the run, and half its interval of 95 %."""
    half = samples[len(samples) // 2 :]
    hours = np.array([each.at for each in half]) / 3600
    values = np.array([float(getattr(each, name)) for each in half])
    if len(half) < 3:
        return 0.0, float("inf")
    (gradient, _), covariance = np.polyfit(hours, values, 1, cov=True)
    return float(gradient), 1.96 * float(covariance[0, 0]) ** 0.5


def replayed(recording: Path) -> str:
    """Why the recording cannot be followed by the scheduler; empty if it can."""
    command = [sys.executable, "-m", "gateway", "simulate", "--replay", str(recording)]
    child = subprocess.run(command, capture_output=True, text=True)
    return "" if child.returncode == 0 else (child.stderr or child.stdout)[-300:]


def report(result: Result) -> str:
    """The Markdown tables."""
    tally, mib = result.tally, MIB
    lines = [
        f"{result.seconds / 60:.0f} minutes: {sum(tally.behaviours.values())} requests, "
        f"{sum(tally.answers.values())} whole answers, all compared; "
        f"{sum(result.faults.values())} faults; {len(tally.failures)} different or lost.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(result.faults.items())),
        "",
        "| clients | requests |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in tally.behaviours.items()),
        f"| sent again after 429, 503 or a broken connection | {sum(tally.retries.values())} |",
        "",
        "| | idle, before | idle, after | slope over the second half, 95 % |",
        "|---|---|---|---|",
    ]
    assert result.before is not None, "measured before the load"
    assert result.after is not None, "measured at the end"
    for title, name in (("server", "server_bytes"), ("worker", "worker_bytes")):
        gradient, margin = slope(result.samples, name)
        lines.append(
            f"| private memory of the {title}, MiB | {getattr(result.before, name) / mib:.1f} | "
            f"{getattr(result.after, name) / mib:.1f} | "
            f"{gradient / mib:+.1f} ± {margin / mib:.1f} per hour |"
        )
    for name in ("descriptors", "threads", "processes"):
        before, after = getattr(result.before, name), getattr(result.after, name)
        lines.append(f"| {name} | {before} | {after} | |")
    return "\n".join(lines)


def flags_in(folder: Path) -> list[str]:
    """The server's flags, with the files that they need in `folder`."""
    loras = {name: builtin_lora(folder / name, seed) for seed, name in enumerate(LORAS)}
    keys = folder / "keys.toml"
    keys.write_text(f'[chaos]\nkey = "{KEY}"\nadmin = true\n')
    named = [each for name in SERVED_LORAS for each in ("--lora", f"{name}={loras[name]}")]
    files = ["--disk-kv", str(folder / "kv"), "--store", str(folder / "store.db")]
    return [*FLAGS, *named, "--max-loras", "4", *files, "--api-key-file", str(keys)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a server fail in all ways under load.")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between faults")
    parser.add_argument("--record", action="store_true", help="record, and replay in the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write chaos.json here")
    parser.add_argument("flags", nargs="*", help="after --: flags of podway serve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [*flags_in(folder), *arguments.flags]
        recording = folder / "record.jsonl"
        flags += ["--record", str(recording)] if arguments.record else SPECULATION
        with serving(flags) as (server, url):
            result = asyncio.run(run(server, url, folder, arguments))
            children = server.children(recursive=True)
        _, alive = psutil.wait_procs(children, timeout=30)
        if alive:
            result.problems.append(f"{len(alive)} processes outlived the server")
        if arguments.record and (reason := replayed(recording)):
            result.problems.append(f"the recording cannot be replayed: {reason}")
    print(report(result))
    for line in [*result.problems, *result.tally.failures[:20]]:
        print(line, file=sys.stderr)
    if arguments.out is not None:
        flags = [re.sub(r"/tmp/\S+/", "", flag) for flag in flags]
        written = vars(result) | {"tally": vars(result.tally), "flags": flags}
        (arguments.out / "chaos.json").write_text(json.dumps(written, indent=1) + "\n")
    sys.exit(bool(result.problems or result.tally.failures))


if __name__ == "__main__":
    main()
