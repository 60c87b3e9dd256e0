"""Arrivals: the times and lengths of requests, from a trace file or from a distribution.

A trace is a list of `Arrival` sorted by time. It contains no text: synthetic prompts are made
when a request arrives. Two prompts share the leading blocks with equal names and nothing else.
"""

import csv
import gzip
import json
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from pathlib import Path
from random import Random

from engine.errors import InvalidRequest
from engine.request import RequestSpec
from engine.step import SamplingParams

Lengths = Callable[[Random], tuple[int, int]]  # samples (prompt_len, output_len)

GREEDY = SamplingParams(temperature=0.0)
SHARED_BLOCK = 512  # tokens per entry of `Arrival.blocks`, as in the Mooncake traces
_FIRST_UNIQUE_TOKEN = 1 << 30  # lower token ids are names of shared blocks


class BadTrace(InvalidRequest):
    """A trace file that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: its time in seconds after the start, and its lengths in tokens.

    `blocks` names the leading blocks of `SHARED_BLOCK` prompt tokens; equal names mean equal
    tokens. The client disconnects after `patience` seconds if the output has not ended by then.
    """

    at: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    patience: float | None = None

    def spec(self, index: int) -> RequestSpec:
        """The request; `index` is its position in the trace."""
        return RequestSpec(self.prompt(index), self.output_len, GREEDY)

    def prompt(self, index: int) -> tuple[int, ...]:
        """Synthetic token ids; `index` makes the tokens after the named blocks unique."""
        tokens: list[int] = []
        for block in self.blocks[: -(-self.prompt_len // SHARED_BLOCK)]:
            tokens += [block] * SHARED_BLOCK
        tokens += [_FIRST_UNIQUE_TOKEN + index] * (self.prompt_len - len(tokens))
        return tuple(tokens[: self.prompt_len])


def poisson(rate: float, count: int, lengths: Lengths, random: Random) -> list[Arrival]:
    """`count` arrivals at `rate` requests/s with exponential gaps."""
    return _arrivals((random.expovariate(rate) for _ in range(count)), lengths, random)


def gamma(
    rate: float, count: int, lengths: Lengths, random: Random, variation: float
) -> list[Arrival]:
    """Gamma-distributed gaps. `variation` is their coefficient of variation: 1 is a Poisson
    process, more is burstier."""
    shape = variation**-2
    gaps = (random.gammavariate(shape, 1 / (rate * shape)) for _ in range(count))
    return _arrivals(gaps, lengths, random)


def steady(rate: float, count: int, lengths: Lengths, random: Random) -> list[Arrival]:
    """Equal gaps."""
    return _arrivals((1 / rate for _ in range(count)), lengths, random)


def _arrivals(gaps: Iterator[float], lengths: Lengths, random: Random) -> list[Arrival]:
    at = 0.0
    arrivals = []
    for gap in gaps:
        at += gap
        arrivals.append(Arrival(at, *lengths(random)))
    return arrivals


def orca_lengths(random: Random) -> tuple[int, int]:
    """Orca, section 6.2: prompts uniform in 32..512, outputs uniform in 1..128 tokens."""
    return random.randint(32, 512), random.randint(1, 128)


def skewed_lengths(
    max_prompt: int = 1024, max_output: int = 1024, exponent: float = 1.2
) -> Lengths:
    """FastServe's synthetic workload: many short requests and a few long ones.

    Both lengths are independent and follow Zipf's law up to their maxima: a length of k has a
    probability proportional to k ** -exponent.
    """
    prompts, outputs = _zipf(max_prompt, exponent), _zipf(max_output, exponent)

    def sample(random: Random) -> tuple[int, int]:
        return prompts(random), outputs(random)

    return sample


def _zipf(maximum: int, exponent: float) -> Callable[[Random], int]:
    below = list(accumulate(length**-exponent for length in range(1, maximum + 1)))
    return lambda random: 1 + min(bisect_left(below, random.random() * below[-1]), maximum - 1)


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests/s from the first arrival to the last; 0 if they are simultaneous."""
    seconds = arrivals[-1].at - arrivals[0].at if arrivals else 0.0
    return (len(arrivals) - 1) / seconds if seconds else 0.0


def sped_up(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """The same requests with all gaps divided by `factor`, starting at 0 s."""
    start = arrivals[0].at if arrivals else 0.0
    return [replace(arrival, at=(arrival.at - start) / factor) for arrival in arrivals]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests in the same pattern, at `rate` requests/s on average."""
    assert mean_rate(arrivals) > 0.0, "simultaneous arrivals cannot be scaled to a rate"
    return sped_up(arrivals, rate / mean_rate(arrivals))


def superposed(
    arrivals: Sequence[Arrival], copies: int, random: Random, spread: float = 60.0
) -> list[Arrival]:
    """So many copies of the same requests, each later by up to `spread` seconds. Copies share no
    block."""
    names = 1 + max((max(one.blocks) for one in arrivals if one.blocks), default=0)
    if names * copies > _FIRST_UNIQUE_TOKEN:
        raise BadTrace(f"{copies} copies of {names} shared blocks have too many names")
    found: list[Arrival] = []
    for copy in range(copies):
        later = random.uniform(0.0, spread)
        for one in arrivals:
            blocks = tuple([block + copy * names for block in one.blocks])
            found.append(replace(one, at=one.at + later, blocks=blocks))
    return sorted(found, key=lambda one: one.at)


def between(arrivals: Sequence[Arrival], start: float, stop: float) -> list[Arrival]:
    """The arrivals within `[start, stop)` seconds."""
    return [arrival for arrival in arrivals if start <= arrival.at < stop]


def read_trace(path: Path) -> list[Arrival]:
    """Read a CSV or Mooncake JSONL trace, which may be gzipped, sorted by time. Raises
    `BadTrace`."""
    read = read_mooncake if ".jsonl" in path.suffixes else read_csv
    try:
        arrivals = sorted(read(path), key=lambda arrival: arrival.at)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise BadTrace(f"cannot read the trace {path}: {error}") from error
    if not arrivals:
        raise BadTrace(f"the trace {path} has no rows")
    return arrivals


def read_csv(path: Path) -> Iterator[Arrival]:
    """Read lines of arrival_s,prompt_tokens,output_tokens (the Azure LLM inference traces); the
    file may be gzipped and have a header line. Raises `BadTrace`."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if not row or (number == 1 and not row[0].replace(".", "", 1).isdigit()):
                continue
            try:
                at, prompt_len, output_len = float(row[0]), int(row[1]), int(row[2])
            except (ValueError, IndexError) as error:
                columns = "seconds, prompt tokens, output tokens"
                raise BadTrace(f"{path}, line {number}: expected {columns}, not {row}") from error
            yield _arrival(path, number, Arrival(at, prompt_len, output_len))


def read_mooncake(path: Path) -> Iterator[Arrival]:
    """Read JSON lines of `timestamp` (ms), `input_length`, `output_length` and `hash_ids` (one
    per 512 prompt tokens; equal ids mean a shared prefix); the file may be gzipped. Raises
    `BadTrace`."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                arrival = Arrival(
                    at=float(row["timestamp"]) / 1e3,
                    prompt_len=int(row["input_length"]),
                    output_len=int(row["output_length"]),
                    blocks=tuple(map(int, row.get("hash_ids", ()))),
                )
            except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
                raise BadTrace(f"{path}, line {number}: {error!r}") from error
            yield _arrival(path, number, arrival)


def _arrival(path: Path, number: int, arrival: Arrival) -> Arrival:
    if arrival.prompt_len < 1 or arrival.output_len < 1 or not 0.0 <= arrival.at < inf:
        raise BadTrace(f"{path}, line {number}: lengths must be at least 1 and times at least 0")
    return arrival
