"""What a load run sends and when: lengths, arrivals, traces, and the prompts made up for them.

The same seed gives the same requests. Prompts of token ids are distinct from one another, except
where a trace says that two share a prefix.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.simulated import trace
from gateway.commands.http_client import ServerError

_PROSE = """the pod went out on a calm day and came back with news of the sea each whale had
a song of its own and no two were the same but all of them could be heard from far off by night"""
_WORDS = tuple(_PROSE.split())


class WorkloadError(ServerError):
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
    arrivals = trace.poisson(
        rate, count, lambda rng: (prompt.draw(rng), output.draw(rng)), random.Random(seed)
    )
    return list(_shots(arrivals))


def read_trace(path: Path, time_scale: float, limit: int | None) -> list[Shot]:
    """The shots of a CSV or Mooncake JSONL trace, plain or .gz, from its first arrival on.

    With `time_scale` 2 they come twice as fast. Raises `WorkloadError`.
    """
    try:
        arrivals = trace.read_trace(path)[:limit]
    except trace.BadTrace as error:
        raise WorkloadError(str(error)) from error
    return list(_shots(trace.sped_up(arrivals, time_scale)))


def _shots(arrivals: Iterable[trace.Arrival]) -> Iterator[Shot]:
    for index, arrival in enumerate(arrivals):
        yield Shot(index, arrival.at, arrival.prompt_len, arrival.output_len, arrival.blocks)


@dataclass(frozen=True, slots=True)
class RandomPrompts:
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
        return self._draw(f"{self.seed}/block/{block}", trace.SHARED_BLOCK)

    def _draw(self, seed: str, size: int) -> list[int]:
        choice = range(self.ids.low, self.ids.high + 1) if self.ids else range(len(_WORDS))
        return random.Random(seed).choices(choice, k=size)
