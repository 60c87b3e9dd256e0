"""One case: requests with images on a worker that computes, beside others, with chunks, slices,
deaths, preemptions, swaps, drafts, lookahead and clients that leave. Each output has the tokens and
the log-probabilities, to the bit, of its request alone on the same worker."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest.mock import patch

from torch import Tensor

from engine.control.admission import Admission, SwapMode
from engine.cost.model import CostModel
from engine.errors import WorkerLost
from engine.loop import Engine
from engine.media import ImagePixels
from engine.policy.table import build
from engine.request import RequestSpec
from engine.step import SamplingParams, Step, StepResult, TokenLogprobs
from engine.worker.ports import KVTensors
from engine.worker.process.stage_kv import StageKV
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerReport
from tests.engine.worker.process.driving import settings_for
from tests.fuzz.engine.images import sliced
from tests.inline import RequestOutcome, play, read_all
from tests.models.drafts import a_drafter
from tests.models.images import VARIANTS, Picture, Prompt, make_checkpoint, picture

COST = CostModel.linear(per_step=1e-3, per_token=1e-5, per_slot=0.0)
SIZES = ((2, 2), (4, 6), (6, 4), (10, 14))  # rows and columns of patches
BLOCK_SIZE = 4
MOST_NEW = 40  # tokens of an output
GARBAGE = 5.0  # in the memory of a worker that died


class Different(AssertionError):
    """A disturbed output is not the undisturbed one."""


class Alone(NamedTuple):
    """What a request gives when nothing disturbs it."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass
class Watched:
    """A worker that dies in some steps, with all it knows, and counts what it did."""

    worker: Worker
    memory: list[Tensor]
    counts: "Counter[str]"
    dies_in: frozenset[int] = frozenset()
    num_steps: int = 0
    halves: set[int] = field(default_factory=set)  # images of which some slices are encoded

    @property
    def report(self) -> WorkerReport:
        return self.worker.report

    def put_pixels(self, piece: ImagePixels) -> None:
        self.worker.put_pixels(piece)

    def run(self, step: Step) -> StepResult:
        self.num_steps += 1
        if self.num_steps in self.dies_in:
            self.counts["deaths"] += 1
            self.counts["deaths amid an image"] += bool(self.halves)
            self.halves.clear()
            self.worker.parts.images._images.clear()
            for tensor in self.memory:
                tensor.fill_(GARBAGE)
            raise WorkerLost("as scripted")
        self._count(step)
        return self.worker.run(step)

    def _count(self, step: Step) -> None:
        assert self.report.encoder is not None
        for image, start, stop in step.encodes:
            self.counts["slices"] += stop - start
            self.halves.add(image)
            self.counts["begun images"] += start == 0
            self.counts["images in several iterations"] += start > 0
        self.counts["dropped images"] += len(step.dropped)
        for entry in step.entries:
            rows = entry.media.rows if entry.media else ()
            self.halves -= {each.image for each in rows}
            self.counts["chunks within an image"] += any(each.first for each in rows)


@dataclass(frozen=True)
class Served:
    """A variant's worker, and the images that prompts have."""

    variant: str
    worker: Worker
    memory: list[Tensor]
    pictures: list[Picture]

    @property
    def most_rows(self) -> int:
        """Tokens of the largest image."""
        return max(each.num_tokens for each in self.pictures)

    def expected(self, spec: RequestSpec) -> Alone:
        """The request's output, alone in steps that nothing bounds."""
        (found,) = play(self.worker, [spec], max_batch_tokens=512)
        assert found.error is None, found.error
        return Alone(found.tokens, found.logprobs)


@cache
def served(variant: str) -> Served:
    """A worker with host memory; it lives as long as the process."""
    memory: list[Tensor] = []
    allocate = StageKV.allocate

    def watched(kv: StageKV, num_blocks: int) -> KVTensors:
        tensors = allocate(kv, num_blocks)
        memory.extend(tensors.in_memory_order())
        return tensors

    with tempfile.TemporaryDirectory() as directory, patch.object(StageKV, "allocate", watched):
        model = make_checkpoint(Path(directory), variant)
        settings = settings_for(model, "cpu", host_kv_memory=1 << 18, block_size=BLOCK_SIZE)
        worker = Worker.load(settings, lambda *_: None)
    pictures = [picture(variant, *size, seed) for seed, size in enumerate(SIZES)]
    return Served(variant, worker, memory, pictures)


class Case:
    """The case of a seed."""

    def __init__(self, seed: int, counts: "Counter[str]") -> None:
        self.random = Random(seed)
        self.counts = counts
        self.served = served(self.random.choice(sorted(VARIANTS)))
        self.specs: list[RequestSpec] = []
        for _ in range(self.random.randint(1, 5)):
            self.specs.append(self._draw_spec())
        self.bounds = self._draw_bounds()
        self.lookahead = self.random.choice([0, 0, 1])
        self.num_blocks = self._draw_blocks()
        self.leaves = [self._draw_leave() for _ in self.specs]
        self.has_drafts = self.random.random() < 0.3
        deaths = self.random.choice([0, 0, 1, 2])
        self.dies_in = frozenset(self.random.randint(1, 25) for _ in range(deaths))
        self.policy = self.random.choice(["fcfs", "fcfs", "mlfq", "priority"])

    def __repr__(self) -> str:
        lengths = [len(spec.prompt) for spec in self.specs]
        return (
            f"{self.served.variant}: prompts of {lengths}, {self.bounds}, {self.policy}, "
            f"lookahead {self.lookahead}, {self.num_blocks} blocks, leave after {self.leaves}, "
            f"drafts {self.has_drafts}, dies in {sorted(self.dies_in)}"
        )

    @property
    def _longest_prompt(self) -> int:
        """Tokens of a prompt beside which the context has room for any output."""
        return self.served.worker.report.max_model_len - MOST_NEW

    def _draw_spec(self) -> RequestSpec:
        """A new prompt, or a later turn of a chat."""
        if self.specs and self.random.random() < 0.3:
            first = self.random.choice(self.specs)
            more = range(3, self.random.randint(4, 12))
            room = self._longest_prompt - len(first.prompt)
            return replace(first, prompt=(*first.prompt, *more[: max(0, room)]))
        parts: list[Picture | list[int]] = [[5, 6, 92][: self.random.randint(0, 3)] or [7]]
        for _ in range(self.random.choice([0, 1, 1, 2])):
            parts.append(self.random.choice(self.served.pictures))
            parts.append([self.random.randint(1, 80) for _ in range(self.random.randint(1, 6))])
        while len(Prompt.of(*parts).tokens) > self._longest_prompt:
            del parts[-2:]  # an image, and what follows it
        prompt = Prompt.of(*parts)
        sampling = SamplingParams(
            temperature=self.random.choice([0.0, 0.7]), seed=self.random.randint(0, 9)
        )
        return RequestSpec(
            prompt.tokens,
            self.random.randint(1, MOST_NEW),
            sampling,
            media=prompt.media,
            logprobs=0,
            priority=self.random.randint(0, 2),
        )

    def _draw_bounds(self) -> dict[str, object]:
        random, encoder = self.random, self.served.worker.report.encoder
        assert encoder is not None
        size, tokens = random.choice([1, 2, 4]), random.choice([4, 7, 16, 40, 300])
        if encoder.is_whole:
            tokens = max(tokens, self.served.most_rows + size - 1)
        kept = random.choice([1, 2, 100]) * self.served.most_rows * encoder.row_bytes
        return {
            "max_batch_size": size,
            "max_batch_tokens": max(size, tokens),
            "swap": random.choice(list(SwapMode)),
            "admission": random.choice([Admission.GROW, Admission.GROW, Admission.RESERVE]),
            "reuses_prefixes": random.random() < 0.7,
            "encoder_memory": kept,
        }

    def _draw_blocks(self) -> int:
        """All, or hardly more than the longest request needs."""
        if self.random.random() < 0.4:
            return 0
        report = self.served.worker.report
        longest = max(len(spec.prompt) + spec.max_tokens for spec in self.specs)
        chunk = int(str(self.bounds["max_batch_tokens"])) * (1 + self.lookahead)
        needed = sum(
            -(-(longest if window is None else min(longest, window + chunk)) // BLOCK_SIZE) + 1
            for window in report.windows
        )
        return min(needed + self.random.randint(0, 4), report.num_blocks)

    def _draw_leave(self) -> int | None:
        """The tokens after which a client leaves; None for one that stays."""
        return self.random.choice([None, None, None, 0, self.random.randint(1, 6)])

    def play(self) -> None:
        """Raises `Different` or what the engine raises."""
        expected = [self.served.expected(spec) for spec in self.specs]
        worker = Watched(self.served.worker, self.served.memory, self.counts, self.dies_in)
        places = dict(zip(map(id, self.specs), self.leaves, strict=True))

        async def client(engine: Engine, spec: RequestSpec) -> RequestOutcome:
            for _ in range(self.random.choice([0, 0, 3, 30])):
                await asyncio.sleep(0)
            return await read_all(engine, spec, places[id(spec)])

        with sliced(self.random):
            outcomes = play(
                worker,
                self.specs,
                num_blocks=self.num_blocks,
                lookahead=self.lookahead,
                drafter=a_drafter([each.tokens for each in expected]) if self.has_drafts else None,
                policy=build(self.policy, COST),
                client=client,
                **self.bounds,  # type: ignore[arg-type]
            )
        self._compare(outcomes, expected)

    def _compare(self, outcomes: Iterable[RequestOutcome], expected: list[Alone]) -> None:
        for outcome, alone, leave in zip(outcomes, expected, self.leaves, strict=True):
            request = outcome.request
            self.counts["preempted"] += request.setbacks.num_preemptions
            self.counts["swapped"] += request.setbacks.num_swaps
            self.counts["cached tokens"] += request.num_cached
            if outcome.error is not None:  # two deaths are too few to give up a request
                raise outcome.error
            if leave is not None and outcome.finish is None:
                self.counts["left"] += 1
            elif len(outcome.tokens) != len(alone.tokens):
                raise Different(f"{len(outcome.tokens)} tokens, not {len(alone.tokens)}")
            else:
                self.counts["whole outputs"] += 1
            count = len(outcome.tokens)
            if outcome.tokens != alone.tokens[:count]:
                raise Different(f"{outcome.tokens} is not {alone.tokens[:count]}")
            if outcome.logprobs != alone.logprobs[:count]:
                raise Different(f"log-probabilities of {outcome.tokens} differ")


def play_case(seed: int, counts: "Counter[str]") -> None:
    """Play the case of a seed, and count what happened in it."""
    case = Case(seed, counts)
    case.play()
    counts["cases with lookahead"] += case.lookahead
    counts["cases with drafts"] += case.has_drafts
    counts[f"cases: {case.served.variant}"] += 1
