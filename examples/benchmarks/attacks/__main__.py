"""Measure other clients' inter-token latency and the server's memory under each attack.

    python -m examples.benchmarks.attacks [--seconds 8] [--streams 16] [--model builtin]
        [--only NAME ...] [--out DIR]

For each attack, in one run: `--streams` streams undisturbed, then the same streams while the attack
runs in a process of its own, at the lowest priority. Where an ordinary load costs the model as much
as the attack, that is measured as well. Results are added to DIR/attacks.json.
"""

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import aiohttp
import psutil

from examples.benchmarks.attacks.catalog import CASES, trusting
from examples.benchmarks.attacks.honest import HonestStreams
from examples.benchmarks.attacks.report import HEAD, Figures, quantiles, row
from examples.benchmarks.soak import serving, until_idle

SETTLE_SECONDS = 2.0


def rss_mib(server: psutil.Process) -> float:
    """Resident memory of the server's own process, which reads what clients send."""
    return round(server.memory_info().rss / (1 << 20), 1)


async def window(streams: HonestStreams, seconds: float) -> Figures:
    """The ITL of the next `seconds`, or longer if no chunk arrives in them."""
    start, gaps = time.perf_counter(), list[float]()
    while not gaps:
        await asyncio.sleep(seconds)
        gaps = streams.between(start, time.perf_counter())
    return quantiles(gaps)


async def attacked(
    streams: HonestStreams, name: str, arguments: argparse.Namespace
) -> tuple[Figures, dict[str, int]]:
    """The ITL while the attack runs, and its outcomes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.benchmarks.attacks.attacker"),
        *(name, streams.url, streams.model, str(arguments.seconds + SETTLE_SECONDS)),
        stdout=asyncio.subprocess.PIPE,
    )
    await asyncio.sleep(SETTLE_SECONDS)
    figures = await window(streams, arguments.seconds)
    output, _ = await process.communicate()
    return figures, json.loads(output)


async def measure(
    server: psutil.Process, url: str, name: str, arguments: argparse.Namespace
) -> Figures:
    """The figures of one attack."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, ssl=trusting())
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        streams = HonestStreams(session, url, arguments.model)
        tasks = [asyncio.create_task(streams.stream(n)) for n in range(arguments.streams)]
        await asyncio.sleep(SETTLE_SECONDS)
        result: Figures = {"rss_before_mib": rss_mib(server)}
        result["undisturbed"] = await window(streams, arguments.seconds)
        if CASES[name].control is not None:
            result["control"], _ = await attacked(streams, f"{name}/control", arguments)
            await asyncio.sleep(SETTLE_SECONDS)
        result["attacked"], result["outcomes"] = await attacked(streams, name, arguments)
        streams.is_over = True
        await asyncio.gather(*tasks)
        await until_idle(session, url)
        result["rss_after_mib"] = rss_mib(server)
        result["failures"] = streams.failures
    return result


def certificate(directory: Path) -> None:
    """A self-signed certificate, cert.pem and key.pem."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=localhost -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=directory, check=True, capture_output=True)


def run(names: Sequence[str], arguments: argparse.Namespace, scratch: Path) -> dict[str, Figures]:
    """Every attack; those that need the same flags share a server."""
    results: dict[str, Figures] = {}
    print(HEAD)
    for flags, group in groupby(sorted(names, key=_flags), key=_flags):
        own = [flag.format(tls=scratch) for flag in flags] + ["--store", "memory"]
        if any("{tls}" in flag for flag in flags):
            certificate(scratch)
        with serving([arguments.model, *own]) as (server, url):
            for name in group:
                results[name] = asyncio.run(measure(server, url, name, arguments))
                print(row(name, results[name]), flush=True)
                if arguments.out is not None:
                    keep(results, arguments.out / "attacks.json")
                print("   ", results[name]["outcomes"], results[name]["failures"][:3], flush=True)
    return results


def _flags(name: str) -> tuple[str, ...]:
    return CASES[name].flags


def keep(results: dict[str, Figures], path: Path) -> None:
    """Add the results to those of the file."""
    known = json.loads(path.read_text())["attacks"] if path.exists() else {}
    text = {"machine": platform.processor(), "attacks": known | results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(text, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure honest streams beside attacks.")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path, help="directory of attacks.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = run(arguments.only or list(CASES), arguments, Path(scratch))
    sys.exit(any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    main()
