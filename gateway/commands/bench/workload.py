"""The requests of a load run: lengths, arrival times, traces, and random prompts.

The same seed gives the same requests. Prompts of token ids differ from each other, except where a
trace says that two share a prefix.
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
    """A trace file that cannot be parsed; the message names the line."""


class LengthRange(NamedTuple):
    """A length in tokens, sampled uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "LengthRange":
        """Parse `128` or `32..512`. Raises `ValueError`."""
        low, dots, high = text.partition("..")
        length_range = cls(int(low), int(high) if dots else int(low))
        if not 1 <= length_range.low <= length_range.high:
            raise ValueError(f"{text!r} is not a range of lengths")
        return length_range

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"

    def sample(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send: `at` seconds after the start, its lengths, its shared prefix blocks."""

    index: int
    at: float
    prompt_tokens: int
    output_tokens: int
    shared_blocks: tuple[int, ...] = ()


def closed_loop_requests(
    count: int, prompt: LengthRange, output: LengthRange, seed: int
) -> list[PlannedRequest]:
    """Requests without a planned time, for a closed loop."""
    rng = random.Random(seed)
    return [
        PlannedRequest(index, 0.0, prompt.sample(rng), output.sample(rng)) for index in range(count)
    ]


def poisson_requests(
    count: int, rate: float, prompt: LengthRange, output: LengthRange, seed: int
) -> list[PlannedRequest]:
    """Poisson arrivals with a mean of `rate` per second (Orca, section 6)."""
    arrivals = trace.poisson(
        rate, count, lambda rng: (prompt.sample(rng), output.sample(rng)), random.Random(seed)
    )
    return list(_planned_requests(arrivals))


def read_trace(path: Path, time_scale: float, limit: int | None) -> list[PlannedRequest]:
    """The requests of a CSV or Mooncake JSONL trace, plain or .gz; the first is at second 0.

    With `time_scale` 2 they arrive twice as fast. Raises `WorkloadError`.
    """
    try:
        arrivals = trace.read_trace(path)[:limit]
    except trace.BadTrace as error:
        raise WorkloadError(str(error)) from error
    return list(_planned_requests(trace.sped_up(arrivals, time_scale)))


def _planned_requests(arrivals: Iterable[trace.Arrival]) -> Iterator[PlannedRequest]:
    for index, arrival in enumerate(arrivals):
        yield PlannedRequest(
            index, arrival.at, arrival.prompt_len, arrival.output_len, arrival.blocks
        )


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Random prompts: token ids from the range `ids`, or as many short words if it is None."""

    seed: int
    ids: LengthRange | None

    def of(self, request: PlannedRequest) -> list[int] | str:
        """The prompt of a request; a shared block has the same tokens in every prompt."""
        size = request.prompt_tokens
        blocks = (self._block(block) for block in request.shared_blocks)
        shared = list(itertools.islice(itertools.chain.from_iterable(blocks), size))
        tokens = shared + self._sample(f"{self.seed}/{request.index}", size - len(shared))
        return tokens if self.ids else " ".join(_WORDS[token] for token in tokens)

    def _block(self, block: int) -> list[int]:
        return self._sample(f"{self.seed}/block/{block}", trace.SHARED_BLOCK)

    def _sample(self, seed: str, size: int) -> list[int]:
        choice = range(self.ids.low, self.ids.high + 1) if self.ids else range(len(_WORDS))
        return random.Random(seed).choices(choice, k=size)
