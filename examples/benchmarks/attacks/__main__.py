"""Measure other clients' inter-token latency and the server's memory under each attack.

    python -m examples.benchmarks.attacks --out examples/benchmarks/results/attacks
        [--rounds 2] [--seconds 0.8] [--streams 16] [--model builtin] [--only NAME ...] [--nice 19]

For each attack `--rounds` times: `--streams` streams undisturbed, then the same streams while the
attack runs. Beside them another client sends short requests, each on a new connection, whose time
to the first token is measured. Where an ordinary load costs the model as much as the attack, that
is measured in each round as well. The attacker is a process of its own at the lowest priority
(`--nice`), since its CPU time is not the server's, and has an address of its own. Attacks with
images are on a model of random weights, since the built-in one reads none. Results are added
to DIR/attacks.json, and the first table of DIR/README.md is replaced by them. All attacks take
about seven minutes.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from examples.benchmarks.attacks.catalog import CASES
from examples.benchmarks.attacks.honest import HonestStreams
from examples.benchmarks.attacks.images import write_model
from examples.benchmarks.attacks.report import (
    COLUMNS,
    Figures,
    quantiles,
    row,
    table_head,
    write_table,
)
from examples.benchmarks.attacks.sending import trusting
from examples.benchmarks.server.served import serving, until_idle

SERVER_FLAGS = ("--store", "memory", "--cost-model", "measure")  # not one saved on a busy machine
SETTLE_SECONDS = 0.5
LOAD_BEFORE = round(os.getloadavg()[0], 2)  # processes that wanted to run, in the last minute


def rss_mib(server: psutil.Process) -> float:
    """Resident memory of the server's own process, which reads what clients send."""
    return round(server.memory_info().rss / (1 << 20), 1)


async def window(streams: HonestStreams, seconds: float) -> Figures:
    """The ITL of the next `seconds`, or longer if no chunk arrives in them, with the longest one;
    and the time to the first token of the short requests that were sent meanwhile."""
    start = end = time.perf_counter()
    gaps: list[float] = []
    while not gaps:
        await asyncio.sleep(seconds)
        gaps = streams.between(start, end := time.perf_counter())
    figures = quantiles(gaps) | {"max": round(1e3 * gaps[-1], 2)}
    return figures | {"ttft": quantiles(await streams.waits_between(start, end))}


@dataclass
class AttackerProcess:
    """The process that attacks."""

    process: asyncio.subprocess.Process
    seconds: float  # of a measurement

    async def run(self, name: str, streams: HonestStreams) -> tuple[Figures, dict[str, int]]:
        """The ITL while the attack runs, and its outcomes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = json.dumps((name, self.seconds + SETTLE_SECONDS)).encode()
        self.process.stdin.write(command + b"\n")
        await asyncio.sleep(SETTLE_SECONDS)
        figures = await window(streams, self.seconds)
        outcomes = json.loads(await self.process.stdout.readline())
        await asyncio.sleep(CASES[name.removesuffix("/control")].rest_seconds)
        return figures, outcomes


@asynccontextmanager
async def attacking(url: str, arguments: argparse.Namespace) -> AsyncIterator[AttackerProcess]:
    """Start the attacking process; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.benchmarks.attacks.attacker"),
        *(url, arguments.model, str(arguments.nice)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        await process.stdout.readline()  # it is ready
        yield AttackerProcess(process, arguments.seconds)
    finally:
        process.terminate()
        await process.wait()


async def rounds(
    attacker: AttackerProcess, streams: HonestStreams, name: str, number: int
) -> dict[str, Any]:
    """The figures of each round, and the outcomes of all."""
    result: dict[str, Any] = {"undisturbed": [], "attacked": [], "outcomes": {}}
    for _ in range(number):
        result["undisturbed"].append(await window(streams, attacker.seconds))
        if CASES[name].control is not None:
            figures, _ = await attacker.run(f"{name}/control", streams)
            result.setdefault("control", []).append(figures)
        figures, outcomes = await attacker.run(name, streams)
        result["attacked"].append(figures)
        for outcome, count in outcomes.items():
            result["outcomes"][outcome] = result["outcomes"].get(outcome, 0) + count
    return result


async def measure(
    server: psutil.Process, url: str, name: str, attacker: AttackerProcess, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one attack."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, ssl=trusting())
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        streams = HonestStreams(url, args.model)
        tasks = [asyncio.create_task(streams.stream(n)) for n in range(args.streams)]
        tasks.append(asyncio.create_task(streams.short_requests()))
        await asyncio.sleep(SETTLE_SECONDS)
        before = rss_mib(server)
        result = await rounds(attacker, streams, name, args.rounds)
        streams.is_over = True
        await asyncio.gather(*tasks)
        await until_idle(session, url)
        sizes = {"rss_before_mib": before, "rss_after_mib": rss_mib(server)}
        return result | sizes | {"failures": streams.failures}


async def measure_all(
    server: psutil.Process, url: str, names: Sequence[str], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The figures of attacks against one server."""
    results: dict[str, dict[str, Any]] = {}
    async with attacking(url, args) as attacker:
        for name in names:
            results[name] = await measure(server, url, name, attacker, args)
            print(row(name, results[name]), flush=True)
            print("   ", results[name]["outcomes"], results[name]["failures"][:3], flush=True)
    return results


def certificate(directory: Path) -> None:
    """A self-signed certificate, cert.pem and key.pem."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=directory, check=True, capture_output=True)


def run(
    names: Sequence[str], arguments: argparse.Namespace, scratch: Path
) -> dict[str, dict[str, Any]]:
    """Every attack; those that need the same flags share a server."""
    results: dict[str, dict[str, Any]] = {}
    print(table_head(COLUMNS))
    for (flags, needs_images), group in groupby(sorted(names, key=_server), key=_server):
        own = [flag.format(tls=scratch) for flag in flags] + [*SERVER_FLAGS]
        if any("{tls}" in flag for flag in flags):
            certificate(scratch)
        model = write_model(scratch) if needs_images else arguments.model
        with serving([model, "--served-model-name", arguments.model, *own]) as (server, url):
            results |= uvloop.run(measure_all(server, url, list(group), arguments))
        if arguments.out is not None:
            keep(results, arguments.out / "attacks.json")
    return results


def _server(name: str) -> tuple[tuple[str, ...], bool]:
    return CASES[name].flags, CASES[name].needs_images


def keep(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Add the results to those of the file, in the order of the catalog, and to its page."""
    known = json.loads(path.read_text())["attacks"] if path.exists() else {}
    merged = known | results
    ordered = {name: merged[name] for name in CASES if name in merged}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {"machine": machine(), "load_before": LOAD_BEFORE, "attacks": ordered}
    path.write_text(json.dumps(text, indent=1) + "\n")
    page = path.with_name("README.md")
    if page.exists():
        page.write_text(write_table(page.read_text(), ordered))


def machine() -> str:
    """The number of cores and the name of the CPU."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return f"{os.cpu_count()} cores, {'unknown' if found is None else found[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure honest streams beside attacks.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each measurement")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--model", default="builtin")
    parser.add_argument(
        "--nice", type=int, default=19, help="of the attacker; less where other jobs need the CPU"
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path, help="directory of attacks.json and its README.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = run(arguments.only or list(CASES), arguments, Path(scratch))
    sys.exit(any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    main()
