"""The loads of every server: `podway bench` with the same prompts, closed or open loop."""

import csv
import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from engine.simulated.trace import poisson, read_trace
from examples.benchmarks.peers.servers import Up

AZURE = Path(__file__).parents[3] / "tests" / "data" / "azure_2023_conv_first_1000.csv.gz"
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The flags of `podway bench`, and whether the loop is open."""

    name: str
    flags: tuple[str, ...]
    is_open: bool

    def run(self, up: Up, scratch: Path) -> Figures:
        """The client's figures, and the CPU seconds of the server and of all other processes."""
        out = scratch / "figures.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gateway", "bench", up.url, "--model", up.model]
        command += ["--new-connections", "--json", str(out), *self.flags]
        busy, own = _busy_seconds(), up.cpu_seconds()
        ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if not out.exists():
            return {"failed": ran.stderr.strip().splitlines()[-1:]}
        own = up.cpu_seconds() - own
        seen = json.loads(out.read_text())
        return {
            "output_rate": seen["output_tokens_per_second"],
            "num_failed": seen["num_failed"],
            "num_short": seen["num_short"],
            **_quantiles(seen["quantiles"]),
            "wall_seconds": seen["wall_seconds"],
            "server_cpu_seconds": own,
            "other_cpu_seconds": max(0.0, _busy_seconds() - busy - own),  # with the client's
        }


def _quantiles(measures: Mapping[str, list[float]]) -> Figures:
    """A quantile in seconds; answers of one token have no ITL."""
    return {
        f"{name}_p{percent}": measures[name][percent] if measures[name] else None
        for name in ("ttft", "itl")
        for percent in (50, 99)
    }


def _busy_seconds() -> float:
    """CPU seconds of the whole machine since its start."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def read_loads(tables: Mapping[str, Any], scratch: Path) -> list[Load]:
    """`ids` of prompts as a flag of `podway bench`; `[[closed]]`: concurrency, requests, prompt,
    output; `[[azure]]`: rate, requests, divisor. Each load has prompts of its own."""
    ids = ("--ids", tables["ids"])
    loads = [_closed(one, ids) for one in tables.get("closed", [])] + [
        _azure(one, ids, scratch) for one in tables.get("azure", [])
    ]
    return with_seeds(loads)


def with_seeds(loads: Sequence[Load]) -> list[Load]:
    """A seed for each: a prompt that an earlier load had may be in a server's prefix cache."""
    return [
        replace(load, flags=(*load.flags, "--seed", str(number)))
        for number, load in enumerate(loads)
    ]


def _closed(one: Mapping[str, Any], ids: tuple[str, str]) -> Load:
    flags = {
        "-c": one["concurrency"],
        "-n": one["requests"],
        "--prompt-tokens": one["prompt"],
        "--output-tokens": one["output"],
    }
    words = tuple(str(word) for pair in flags.items() for word in pair)
    return Load(f"C={one['concurrency']}", (*words, *ids), is_open=False)


def _azure(one: Mapping[str, Any], ids: tuple[str, str], scratch: Path) -> Load:
    """Poisson arrivals with the lengths of the Azure conversations, divided; always the same."""
    rate, divisor = one["rate"], one["divisor"]
    lengths = iter(
        (max(1, arrival.prompt_len // divisor), max(1, arrival.output_len // divisor))
        for arrival in read_trace(AZURE)
    )
    arrivals = poisson(rate, one["requests"], lambda _: next(lengths), random.Random(0))
    path = scratch / f"azure_{rate}.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        rows.writerows((each.at, each.prompt_len, each.output_len) for each in arrivals)
    return Load(f"{rate:g} requests/s", ("--trace", str(path), *ids), is_open=True)
