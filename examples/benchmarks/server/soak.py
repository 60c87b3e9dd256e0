"""Thousands of short requests, many of them cancelled: a search for leaks.

    python -m examples.benchmarks.server.soak [--requests 10000] [--clients 32] [--out DIR]
                               [-- FLAGS OF podway serve]

Random prompts and lengths; a third of the clients disconnect at a random moment. During the run and
after the last request it counts KV blocks, open descriptors and the private memory of the server
and its workers. Exits with 1 if a block, a descriptor or a process is left.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import psutil

NUM_QUARTERS = 4
LEAVES = 1 / 3  # of all clients


@dataclass(frozen=True)
class Sample:
    """Descriptors and private memory of the server's processes after so many requests."""

    requests: int
    descriptors: int
    server_bytes: int
    workers_bytes: int


@dataclass
class Soak:
    """The results; latencies are seconds of whole answers, in the order in which they ended."""

    latencies: list[float] = field(default_factory=list)
    num_left: int = 0
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    idle: list[Sample] = field(default_factory=list)  # before and after all clients


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[tuple[psutil.Process, str]]:
    """`podway serve` on a free port: its process and its address."""
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--log-level", "error"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"https?://\S+", server.stdout.readline())
            if found is None:
                raise SystemExit("the server did not start")
            yield psutil.Process(server.pid), found.group()
        finally:
            server.send_signal(signal.SIGTERM)


def sample(server: psutil.Process, requests: int) -> Sample:
    """Descriptors and private memory, now."""
    workers = server.children(recursive=True)
    return Sample(
        requests,
        sum(process.num_fds() for process in (server, *workers)),
        server.memory_full_info().uss,
        sum(worker.memory_full_info().uss for worker in workers),
    )


async def gauges(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The values of `/metrics` without labels, and the held KV slots."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'^(\w+|podway_kv_slots\{state="held",tier="device"\}) (\S+)$', text, re.M)
    return {name: float(value) for name, value in found}


async def until_idle(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Poll /metrics until no request runs or waits; returns its values."""
    while True:
        counts = await gauges(session, url)
        if not counts["podway_requests_running"] and not counts["podway_requests_waiting"]:
            return counts
        await asyncio.sleep(0.05)


async def send(session: aiohttp.ClientSession, url: str, chance: random.Random, soak: Soak) -> None:
    """One request; a third of the clients disconnect before its end."""
    body = {
        "model": "builtin",
        "prompt": [chance.randrange(100, 400) for _ in range(chance.randrange(1, 40))],
        "max_tokens": chance.randrange(1, 24),
        "temperature": chance.choice((0.0, 1.0)),
        "stream": chance.random() < 0.5,
    }
    leaves_after = chance.uniform(0.0, 0.3) if chance.random() < LEAVES else None
    started = time.perf_counter()
    try:
        async with asyncio.timeout(leaves_after):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                text = await response.text()
    except TimeoutError:
        soak.num_left += 1
        return
    except aiohttp.ClientError as error:
        soak.failures.append(f"{type(error).__name__}: {error}")
        return
    if response.status != 200 or '"error"' in text:
        soak.failures.append(f"{response.status}: {text[:200]}")
    soak.latencies.append(time.perf_counter() - started)


async def run(server: psutil.Process, url: str, arguments: argparse.Namespace) -> Soak:
    """Send all requests, with `clients` of them at a time."""
    soak, chance = Soak(), random.Random(arguments.seed)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        left = iter(range(arguments.requests))
        warm_up = max(1, arguments.requests // 20)
        for _ in range(warm_up):
            await send(session, url, chance, Soak())
        await until_idle(session, url)
        soak.idle.append(sample(server, 0))

        async def client() -> None:
            for number in left:
                if number % max(1, arguments.requests // 50) == 0:
                    soak.samples.append(sample(server, number))
                await send(session, url, chance, soak)

        await asyncio.gather(*(client() for _ in range(arguments.clients)))
        counts = await until_idle(session, url)
        soak.idle.append(sample(server, arguments.requests))
        if counts["podway_orphan_blocks"]:
            soak.failures.append(f"{counts['podway_orphan_blocks']} orphan blocks")
        held = counts['podway_kv_slots{state="held",tier="device"}']
        if held:
            soak.failures.append(f"{held} slots still held")
    before, after = soak.idle
    if after.descriptors > before.descriptors + 1:  # the connection to /metrics
        soak.failures.append(f"descriptors: {before.descriptors}, then {after.descriptors}")
    return soak


def slope(samples: Sequence[Sample], of: str) -> float:
    """Bytes per request, by least squares over the second half of the samples."""
    half = samples[len(samples) // 2 :]
    xs, ys = [s.requests for s in half], [float(getattr(s, of)) for s in half]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / max(spread, 1.0)


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def report(arguments: argparse.Namespace, soak: Soak) -> str:
    """The Markdown tables."""
    size = max(1, len(soak.latencies) // NUM_QUARTERS)
    quarters = [soak.latencies[at * size : (at + 1) * size] for at in range(NUM_QUARTERS)]
    before, after = soak.idle
    mib = 1 << 20
    lines = [
        f"{arguments.requests} requests by {arguments.clients} clients, {soak.num_left} cancelled, "
        f" {len(soak.failures)} failures; flags: `{' '.join(arguments.flags) or 'none'}`.",
        "",
        "| answers | first quarter | second | third | last |",
        "|---|---|---|---|---|",
        "| median ms | " + " | ".join(f"{quantile(q, 0.5) * 1e3:.0f}" for q in quarters) + " |",
        "| p99 ms | " + " | ".join(f"{quantile(q, 0.99) * 1e3:.0f}" for q in quarters) + " |",
        "",
        "| | idle, before | idle, after | slope over the second half |",
        "|---|---|---|---|",
        f"| open descriptors | {before.descriptors} | {after.descriptors} | |",
    ]
    for name, of in (("server", "server_bytes"), ("workers", "workers_bytes")):
        lines.append(
            f"| private memory of the {name}, MiB | {getattr(before, of) / mib:.1f} | "
            f"{getattr(after, of) / mib:.1f} | {slope(soak.samples, of):.0f} bytes per request |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Look for leaks.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write soak.json here")
    parser.add_argument("flags", nargs="*", help="after --: flags of podway serve")
    arguments = parser.parse_args()
    with serving(arguments.flags) as (server, url):
        soak = asyncio.run(run(server, url, arguments))
        workers = server.children(recursive=True)
    _, alive = psutil.wait_procs(workers, timeout=10)
    if alive:
        soak.failures.append(f"{len(alive)} processes outlived the server")
    print(report(arguments, soak))
    for failure in soak.failures[:20]:
        print(failure, file=sys.stderr)
    if arguments.out is not None:
        result = asdict(soak) | {"flags": arguments.flags}
        (arguments.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(soak.failures))


if __name__ == "__main__":
    main()
