"""Arrivals: when requests come and how long they are, from a file or from a distribution."""

import csv
import gzip
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from random import Random


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds after the start, and lengths in tokens."""

    at: float
    prompt_len: int
    output_len: int


def poisson(
    rate: float, count: int, lengths: "Callable[[Random], tuple[int, int]]", random: "Random"
) -> list[Arrival]:
    """`count` arrivals at `rate` per second; `lengths` draws (prompt_len, output_len)."""
    at = 0.0
    arrivals = []
    for _ in range(count):
        at += random.expovariate(rate)
        arrivals.append(Arrival(at, *lengths(random)))
    return arrivals


def orca_lengths(random: "Random") -> tuple[int, int]:
    """Orca, section 6.2: prompts uniform in 32..512, outputs uniform in 1..128 tokens."""
    return random.randint(32, 512), random.randint(1, 128)


def read_csv(path: "Path") -> "Iterator[Arrival]":
    """Lines of arrival_s,prompt_tokens,output_tokens (the Azure LLM inference traces), perhaps
    gzipped; a header line is skipped."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as file:
        for row in csv.reader(file):
            if row and row[0].replace(".", "", 1).isdigit():
                yield Arrival(float(row[0]), int(row[1]), int(row[2]))
