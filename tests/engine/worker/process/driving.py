"""Drives a `Worker` by hand: blocks from a shuffled pool, requests as plain token lists."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from engine.step import (
    NO_STATE,
    BlockTable,
    RequestId,
    SampleSpec,
    SamplingParams,
    StateSlots,
    Step,
    StepEntry,
    StepId,
    StepResult,
)
from engine.worker.cpu import build, no_compiler, thread_pool
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerReport, WorkerSettings
from tests.worker_settings import worker_settings

GREEDY = SamplingParams(temperature=0.0)
_compiled = cache(lambda function, signature, compiler: build.compiled(function, signature))
# The loops of a pool are read from Numba's cache once, not for each worker.
setattr(  # noqa: B010 # mypy takes it for a mistake
    thread_pool,
    "compiled",
    lambda function, signature: _compiled(function, signature, no_compiler.compiler),
)


class RunsSteps(Protocol):
    """A worker, or several that act as one."""

    @property
    def report(self) -> WorkerReport: ...

    def run(self, step: Step) -> StepResult: ...

    def logits(self, step: Step) -> Tensor | None: ...


def settings_for(
    model: object, attention: str = "cpu", *, kv_dtype: str = "float32", **values: object
) -> WorkerSettings:
    """A small cache in float32, so that logits can be compared with those of transformers; one
    thread."""
    values = {"block_size": 4, "kv_slots": 512, "threads": 1, **values}
    return worker_settings(str(model), attention=attention, kv_cache_dtype=kv_dtype, **values)


def load_worker(model: object, attention: str = "cpu", **values: Any) -> Worker:
    """A worker over a checkpoint directory with these settings."""
    return Worker.load(settings_for(model, attention, **values), lambda *_: None)


@dataclass
class Driver:
    """Owns the block tables of the requests that it runs on a worker."""

    worker: RunsSteps
    seed: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    blocks: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # by request and group
    states: dict[int, int] = field(default_factory=dict)  # state slots

    def __post_init__(self) -> None:
        self.free = list(range(self.worker.report.num_blocks))
        Random(self.seed).shuffle(self.free)

    def entry(self, request: int, tokens: Sequence[int], spec: SampleSpec | None) -> StepEntry:
        """The next tokens of a request; takes blocks as needed."""
        start = self.lengths.get(request, 0)
        self.lengths[request] = start + len(tokens)
        groups = range(len(self.worker.report.windows))
        tables = tuple(BlockTable(0, self.table(request, group)) for group in groups)
        blocks = tables[0].blocks if len(tables) == 1 else b""
        entry = StepEntry(RequestId(request), start, tuple(tokens), blocks, spec)
        if self.worker.report.num_states:
            slot = self.states.setdefault(request, len(self.states))
            entry = entry._replace(state=StateSlots(slot, slot if start else NO_STATE))
        return entry if blocks else entry._replace(tables=tables)

    def table(self, request: int, group: int) -> bytes:
        """The request's blocks in a layer group, which keep all its tokens."""
        table = self.blocks.setdefault((request, group), [])
        while len(table) * self.worker.report.block_size < self.lengths[request]:
            table.append(self.free.pop())
        return np.array(table, "<i4").tobytes()

    def logits(self, *pieces: tuple[int, Sequence[int]]) -> Tensor:
        """One step over (request, tokens) pieces; logits after each piece's last token."""
        spec = SampleSpec(GREEDY)
        entries = tuple(self.entry(request, tokens, spec) for request, tokens in pieces)
        logits = self.worker.logits(Step(StepId(0), entries))
        assert logits is not None, "a worker that holds the head"
        return logits

    def tokens(self, *pieces: tuple[int, Sequence[int], SamplingParams]) -> tuple[int, ...]:
        """One step over (request, tokens, sampling) pieces; the token sampled for each."""
        entries = tuple(
            self.entry(request, tokens, SampleSpec(sampling))
            for request, tokens, sampling in pieces
        )
        return self.worker.run(Step(StepId(0), entries)).tokens

    def generate(self, request: int, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens, one request alone."""
        out: list[int] = []
        feed = list(prompt)
        for _ in range(count):
            (token,) = self.tokens((request, feed, GREEDY))
            out.append(token)
            feed = [token]
        return out
