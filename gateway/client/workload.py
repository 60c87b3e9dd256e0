"""What a load run sends and when: lengths, arrivals, traces, and the prompts made up for them.

The same seed gives the same requests. Prompts of token ids are distinct from one another, except
where a trace says that two share a prefix.
"""

import gzip
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import orjson

from engine.simulated.trace import Arrival, poisson, read_csv
from gateway.client.wire import ServerSaid

_PROSE = """the pod went out on a calm day and came back with news of the sea each whale had
a song of its own and no two were the same but all of them could be heard from far off by night"""
_WORDS = tuple(_PROSE.split())
_MOONCAKE_BLOCK = 512  # tokens that one `hash_ids` entry stands for


class BadTrace(ServerSaid):
    """A trace file that cannot be read; the message names the line."""


class Span(NamedTuple):
    """A length in tokens, drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Span":
        """`128` or `32..512`; raises ValueError."""
        low, dots, high = text.partition("..")
        span = cls(int(low), int(high) if dots else int(low))
        if not 1 <= span.low <= span.high:
            raise ValueError(f"{text!r} is not a range of lengths")
        return span

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to send: when (seconds after the start), how long, with which shared blocks."""

    index: int
    at: float
    prompt_tokens: int
    output_tokens: int
    shared_blocks: tuple[int, ...] = ()


def at_once(count: int, prompt: Span, output: Span, seed: int) -> list[Shot]:
    """Shots without a time of their own, for a closed loop."""
    rng = random.Random(seed)
    return [Shot(index, 0.0, prompt.draw(rng), output.draw(rng)) for index in range(count)]


def at_random(count: int, rate: float, prompt: Span, output: Span, seed: int) -> list[Shot]:
    """Poisson arrivals, `rate` a second on average (Orca, section 6)."""
    arrivals = poisson(
        rate, count, lambda rng: (prompt.draw(rng), output.draw(rng)), random.Random(seed)
    )
    return list(_shots(arrivals))


def read_trace(path: Path, time_scale: float, limit: int | None) -> list[Shot]:
    """The shots of a CSV or Mooncake JSONL trace, plain or .gz, from its first arrival on.

    With `time_scale` 2 they come twice as fast. Raises `BadTrace`.
    """
    read = _read_mooncake if ".jsonl" in path.suffixes else lambda path: _shots(read_csv(path))
    try:
        shots = sorted(itertools.islice(read(path), limit), key=lambda shot: shot.at)
    except (OSError, EOFError) as error:
        raise BadTrace(f"cannot read the trace {path}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BadTrace(f"the trace {path} has a row that does not fit: {error}") from error
    if not shots:
        raise BadTrace(f"the trace {path} has no rows")
    return [replace(shot, at=(shot.at - shots[0].at) / time_scale) for shot in shots]


def _shots(arrivals: Iterable[Arrival]) -> Iterator[Shot]:
    for index, arrival in enumerate(arrivals):
        yield Shot(index, arrival.at, max(1, arrival.prompt_len), max(1, arrival.output_len))


def _read_mooncake(path: Path) -> Iterator[Shot]:
    """`timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one a block of the prompt)."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for index, row in enumerate(map(orjson.loads, lines)):
            yield Shot(
                index,
                at=float(row["timestamp"]) / 1000,
                prompt_tokens=max(1, int(row["input_length"])),
                output_tokens=max(1, int(row["output_length"])),
                shared_blocks=tuple(row.get("hash_ids", ())),
            )


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts up: ids drawn from `ids`, or about as many short words if that is None."""

    seed: int
    ids: Span | None

    def of(self, shot: Shot) -> list[int] | str:
        """The prompt of one shot; blocks that a trace shares come out the same every time."""
        size = shot.prompt_tokens
        blocks = (self._block(block) for block in shot.shared_blocks)
        shared = list(itertools.islice(itertools.chain.from_iterable(blocks), size))
        tokens = shared + self._draw(f"{self.seed}/{shot.index}", size - len(shared))
        return tokens if self.ids else " ".join(_WORDS[token] for token in tokens)

    def _block(self, block: int) -> list[int]:
        return self._draw(f"{self.seed}/block/{block}", _MOONCAKE_BLOCK)

    def _draw(self, seed: str, size: int) -> list[int]:
        choice = range(self.ids.low, self.ids.high + 1) if self.ids else range(len(_WORDS))
        return random.Random(seed).choices(choice, k=size)
