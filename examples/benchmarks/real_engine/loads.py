"""Loads for a small machine: published traces with divided lengths, and synthetic mixes.

A divided trace keeps its arrival pattern, the distribution of its lengths and its shared prefixes.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from engine.request import Request, RequestSpec
from engine.simulated.trace import (
    GREEDY,
    Arrival,
    at_rate,
    poisson,
    read_trace,
    skewed_lengths,
)

DATA = Path(__file__).parents[3] / "tests" / "data"
AZURE = DATA / "azure_2023_conv_first_1000.csv.gz"
MOONCAKE = DATA / "mooncake_conversation_sessions.jsonl.gz"
IDS = (300, 2000)  # token ids of prompts
MOONCAKE_DIVISOR = 32  # an id of the trace is 512 tokens; divided, a block of 16


class EndsAfter(frozenset[int]):
    """End ids of an output that ends by itself after `length` tokens, whichever these are; set
    `request` once it is accepted."""

    length: int
    request: Request | None = None

    def __contains__(self, token: object) -> bool:
        return self.request is not None and len(self.request.output) >= self.length


@dataclass(frozen=True, slots=True)
class Call(Arrival):
    """An arrival with prompt tokens for a real model; `run` tokens are one block of the trace."""

    run: int = 16
    tenant: str = ""
    ttft_deadline: float | None = None
    max_tokens: int | None = None  # if the output ends by itself, as `EndsAfter`

    def spec(self, index: int) -> RequestSpec:
        ends = EndsAfter()
        ends.length = self.output_len
        return RequestSpec(
            self.prompt(index),
            self.max_tokens or self.output_len,
            GREEDY,
            end_ids=frozenset() if self.max_tokens is None else ends,
            tenant=self.tenant,
            ttft_deadline=self.ttft_deadline,
        )

    def prompt(self, index: int) -> tuple[int, ...]:
        """Token ids seeded by block, so that equal blocks are equal; the rest by request."""
        ids: list[int] = []
        for block in self.blocks[: self.prompt_len // self.run]:
            ids += Random(f"block {block}").choices(range(*IDS), k=self.run)
        own = Random(f"request {index}").choices(range(*IDS), k=self.prompt_len - len(ids))
        return (*ids, *own)


def watch_length(request: Request, arrival: Arrival) -> None:
    """To be called with each accepted request: lets its output end as its arrival says."""
    if isinstance(request.spec.end_ids, EndsAfter):
        request.spec.end_ids.request = request


def with_unknown_lengths(calls: Sequence[Call], max_tokens: int = 512) -> list[Call]:
    """The same, but no scheduler knows the length of an output before it ends."""
    return [replace(call, max_tokens=max_tokens) for call in calls]


def azure(count: int, rate: float, divisor: int = 8) -> list[Call]:
    """The first requests of the conversation trace, all lengths divided, at `rate` requests/s."""
    calls = [
        Call(
            one.at,
            max(1, one.prompt_len // divisor),
            max(1, one.output_len // divisor),
        )
        for one in read_trace(AZURE)[:count]
    ]
    return _at_rate(calls, rate)


def skewed(count: int, rate: float, seed: int = 0) -> list[Call]:
    """FastServe's synthetic workload: both lengths follow Zipf's law, up to 256 tokens."""
    arrivals = poisson(rate, count, skewed_lengths(256, 256), Random(seed))
    return [Call(one.at, one.prompt_len, one.output_len) for one in arrivals]


def two_kinds(count: int, rate: float, seed: int = 0) -> list[Call]:
    """Chats with a TTFT deadline of 0.5 s, and long reports with one of 10 s."""
    random = Random(seed)
    calls, at = [], 0.0
    for _ in range(count):
        at += random.expovariate(rate)
        if random.random() < 0.5:
            calls.append(Call(at, random.randint(16, 64), random.randint(4, 24), ttft_deadline=0.5))
        else:
            lengths = random.randint(100, 400), random.randint(24, 64)
            calls.append(Call(at, *lengths, ttft_deadline=10.0))
    return calls


def with_a_large_tenant(count: int, rate: float, seed: int = 0) -> list[Call]:
    """Four tenants send a sixteenth of the load each, the fifth the rest."""
    random = Random(seed)
    calls, at = [], 0.0
    for _ in range(count):
        at += random.expovariate(rate)
        tenant = random.choice(["a", "b", "c", "d"]) if random.random() < 0.25 else "large"
        lengths = random.randint(32, 128), random.randint(8, 32)
        calls.append(Call(at, *lengths, tenant=tenant))
    return calls


def mooncake(count: int, rate: float) -> list[Call]:
    """Whole sessions of the conversation trace, all lengths divided, at `rate` requests/s."""
    with gzip.open(MOONCAKE, "rt") as file:
        rows = [json.loads(line) for line in file][:count]
    calls = [
        Call(
            row["timestamp"] / 1e3,
            max(1, row["input_length"] // MOONCAKE_DIVISOR),
            max(1, row["output_length"] // MOONCAKE_DIVISOR),
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]
    return _at_rate(calls, rate)


def best_hit_rate(calls: Sequence[Call]) -> float:
    """The share of prompt tokens that an unbounded cache without delay would find."""
    seen: set[int] = set()
    found = total = 0
    for call in calls:
        total += call.prompt_len
        full = call.blocks[: (call.prompt_len - 1) // call.run]
        known = 0
        while known < len(full) and full[known] in seen:
            known += 1
        found += known * call.run
        seen.update(call.blocks[: call.prompt_len // call.run])
    return found / total


def _at_rate(calls: Sequence[Call], rate: float) -> list[Call]:
    moved = at_rate(calls, rate)
    return [replace(call, at=one.at) for call, one in zip(calls, moved, strict=True)]
