"""Lookahead off and on: how long workers wait between steps, and tokens/s.

    python -m examples.benchmarks.server.lookahead [MODEL] [--clients 1 8 32] [--rounds 3]
        [--seconds 6] [--out DIR]

Serves a model without and with `--lookahead 1`, alternately for several rounds, under a closed
loop of each number of clients. A step gap is the time from the end of a step in a worker to the
beginning of the next, from the server's `--trace`. Figures are medians over the rounds.
"""

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from examples.benchmarks.server.served import serving

PAUSE = 2.0  # seconds between two loads
LONGEST_GAP = 1.0  # seconds; a longer gap separates two loads


@dataclass(frozen=True)
class Figures:
    """The figures of one load; gaps between steps are in microseconds."""

    tokens_per_second: float
    gap: float
    gap_p90: float
    waiting: float  # share of the worker's time


def spans(trace: Path) -> list[list[tuple[float, float]]]:
    """Begin and end of each step of the first worker in seconds; one list per load."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())
    steps = sorted(
        (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e.get("ph") == "X" and e["pid"] == 1
    )
    loads = [[steps[0]]]
    for before, step in pairwise(steps):
        if step[0] - before[1] > LONGEST_GAP:
            loads.append([])
        loads[-1].append(step)
    return loads


async def load(url: str, clients: int, seconds: float) -> float:
    """Tokens/s of a closed loop of clients; every answer has its maximum length."""
    produced = 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        started = time.perf_counter()

        async def client(number: int) -> None:
            nonlocal produced
            while time.perf_counter() < started + seconds:
                body = {"model": model, "prompt": [100 + number] * 8, "max_tokens": 64}
                body |= {"temperature": 0, "ignore_eos": True}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    produced += (await response.json())["usage"]["completion_tokens"]

        await asyncio.gather(*(client(number) for number in range(clients)))
        return produced / (time.perf_counter() - started)


def figures_of(rate: float, steps: list[tuple[float, float]]) -> Figures:
    gaps = sorted(b[0] - a[1] for a, b in pairwise(steps))
    busy = sum(end - begin for begin, end in steps)
    return Figures(
        tokens_per_second=rate,
        gap=1e6 * median(gaps),
        gap_p90=1e6 * gaps[int(0.9 * len(gaps))],
        waiting=sum(gaps) / (sum(gaps) + busy),
    )


def middle(found: list[Figures]) -> Figures:
    """The median of each figure."""
    rows = [list(asdict(figures).values()) for figures in found]
    return Figures(*(median(values) for values in zip(*rows, strict=True)))


def table(clients: list[int], off: list[Figures], on: list[Figures]) -> str:
    lines = [
        "| clients | tokens/s, off | on | gap µs, off | on | gap p90 µs, off | on "
        "| worker waits, off | on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, a, b in zip(clients, off, on, strict=True):
        lines.append(
            f"| {number} | {a.tokens_per_second:.0f} | {b.tokens_per_second:.0f} "
            f"| {a.gap:.0f} | {b.gap:.0f} | {a.gap_p90:.0f} | {b.gap_p90:.0f} "
            f"| {a.waiting:.1%} | {b.waiting:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lookahead off against on.")
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--threads", type=int, default=1, help="of the worker")
    parser.add_argument("--out", type=Path, help="write lookahead.json here")
    arguments = parser.parse_args()
    flags = [arguments.model, "--threads", str(arguments.threads), "--lookahead"]
    found: dict[tuple[int, int], list[Figures]] = {}
    with TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            for lookahead in (0, 1):
                trace = Path(scratch) / f"{number}-{lookahead}.json"
                rates = []
                with serving([*flags, str(lookahead), "--trace", str(trace)]) as (_, url):
                    for clients in arguments.clients:
                        time.sleep(PAUSE)
                        rates.append(asyncio.run(load(url, clients, arguments.seconds)))
                loads = spans(trace)[-len(rates) :]
                for clients, rate, steps in zip(arguments.clients, rates, loads, strict=True):
                    found.setdefault((lookahead, clients), []).append(figures_of(rate, steps))
    off, on = [[middle(found[ahead, n]) for n in arguments.clients] for ahead in (0, 1)]
    print(table(arguments.clients, off, on))
    if arguments.out is not None:
        results = {
            f"lookahead {a}, {n} clients": [asdict(f) for f in v] for (a, n), v in found.items()
        }
        (arguments.out / "lookahead.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
