"""The server's memory while it rejects 20,000 requests, reads ten times 200 MiB of trailers and
tokenizes 240 texts of 4 MB.

    python -m examples.benchmarks.attacks.memory [--requests 20000] [--texts 240] [--out DIR]

Resident memory of the server's own process, sampled ten times; the slope is that of the second
half. Exits with 1 if the server needs more than 16 MiB more at the end than after the first tenth.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import aiohttp
import psutil

from examples.benchmarks.attacks.catalog import LONG_TEXT, chat, trailers
from examples.benchmarks.attacks.report import replace_rows
from examples.benchmarks.attacks.sending import Attacker
from examples.benchmarks.server.served import serving

SAMPLES = 10
CLIENTS = 16
TOKENIZING_CLIENTS = 4
ALLOWED_MIB = 16.0
COLUMNS = ("load", "first part", "last part", "largest difference")
NO_END = float("inf")
Series = dict[str, list[float]]  # MiB by load


def rss(server: psutil.Process) -> int:
    return int(server.memory_info().rss)


async def rejections(attacker: Attacker, requests: int) -> None:
    """So many requests that get a 400, each another one."""
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await attacker.post("/v1/chat/completions", chat(attacker, f"x {number}", -1))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def texts(attacker: Attacker, number: int) -> None:
    """So many texts to `/tokenize`, `TOKENIZING_CLIENTS` at a time."""
    numbers = iter(range(number))

    async def client() -> None:
        for each in numbers:
            body = {"model": attacker.model, "prompt": f"{each} {LONG_TEXT}"}
            await attacker.post("/tokenize", body)

    await asyncio.gather(*(client() for _ in range(TOKENIZING_CLIENTS)))


async def sampled(server: psutil.Process, step: Callable[[], Awaitable[object]]) -> list[float]:
    """MiB after each of `SAMPLES` steps."""
    sizes = []
    for _ in range(SAMPLES):
        await step()
        await asyncio.sleep(0.5)
        sizes.append(round(rss(server) / (1 << 20), 1))
    return sizes


def slope(sizes: list[float]) -> float:
    """MiB per sample over the second half, by least squares."""
    half = sizes[len(sizes) // 2 :]
    mean_x, mean_y = (len(half) - 1) / 2, sum(half) / len(half)
    spread = sum((x - mean_x) ** 2 for x in range(len(half)))
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(count(), half, strict=False)) / spread


async def measure(server: psutil.Process, url: str, arguments: argparse.Namespace) -> Series:
    """The series of each load, one load after the other."""
    requests, num_texts = arguments.requests, arguments.texts
    async with aiohttp.ClientSession() as session:
        attacker = Attacker(session, url, "builtin", NO_END)
        loads: dict[str, Callable[[], Awaitable[object]]] = {
            f"{requests} rejected requests": lambda: rejections(attacker, requests // SAMPLES),
            "10 x 200 MiB of trailers": lambda: trailers(attacker),
            f"{num_texts} texts of 4 MB to /tokenize": lambda: texts(
                attacker, num_texts // SAMPLES
            ),
        }
        series = {name: await sampled(server, step) for name, step in loads.items()}
    print(dict(attacker.outcomes))
    return series


def rows(series: Series) -> list[str]:
    """The table's rows."""
    return [
        f"| {name} | {sizes[0]:.1f} | {sizes[-1]:.1f} | {max(sizes) - min(sizes):.1f} |"
        for name, sizes in series.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure memory under rejected requests.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--texts", type=int, default=240, help="of 4 MB for /tokenize")
    parser.add_argument("--out", type=Path, help="directory of memory.json and a README.md")
    arguments = parser.parse_args()
    with serving(["builtin", "--store", "memory"]) as (server, url):
        series = asyncio.run(measure(server, url, arguments))
    for name, sizes in series.items():
        print(f"{name}: MiB {sizes}, slope {slope(sizes):.2f} MiB per sample")
    if arguments.out is not None:
        (arguments.out / "memory.json").write_text(json.dumps(series, indent=1) + "\n")
        page = arguments.out / "README.md"
        if page.exists():
            page.write_text(replace_rows(page.read_text(), COLUMNS, rows(series)))
    sys.exit(any(sizes[-1] - sizes[0] > ALLOWED_MIB for sizes in series.values()))


if __name__ == "__main__":
    main()
