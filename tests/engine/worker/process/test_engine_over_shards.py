"""The engine over many workers, with too few KV blocks: outputs are those of lone requests.

Prompts in pieces beside decodes, clients that leave, preemption by swapping and by computing anew,
each with several iterations in flight.
"""

import asyncio
from pathlib import Path
from random import Random

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.iteration import Iteration, Observer
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.priority import LowestPriorityFirst
from engine.request import Request, RequestSpec
from engine.speculation.drafter import Drafter
from engine.step import BlockMove, SamplingParams
from tests.engine.worker.process.driving import Driver, load_worker
from tests.engine.worker.process.fleet import Fleet, FleetExecutor, fleet
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import a_drafter

COUNT = 6


class EventCounts(Observer):
    """Counts preemptions and swaps."""

    def __init__(self) -> None:
        self.num_swaps = self.num_recomputed = self.num_mixed = 0

    def planned(self, iteration: Iteration, now: float) -> None:
        lengths = [len(entry.tokens) for entry in iteration.step.entries]
        self.num_mixed += min(lengths, default=1) == 1 < max(lengths, default=1)

    def preempted(self, request: Request, now: float) -> None:
        self.num_recomputed += 1

    def swapped(self, request: Request, move: BlockMove, now: float) -> None:
        self.num_swaps += 1


def an_ask(number: int) -> RequestSpec:
    prompt = Random(number).choices(range(97), k=3 + 5 * number % 31)
    return RequestSpec(
        tuple(prompt),
        12 + 3 * number % 17,
        SamplingParams(temperature=0.0),
        priority=COUNT - number,
    )


async def read(engine: Engine, ask: RequestSpec, until: int) -> list[int]:
    """The answer, or what there was of it when `until` tokens had come."""
    tokens: list[int] = []
    with engine.stream(ask) as stream:
        while len(tokens) < until:
            chunk = await stream.next()
            tokens += chunk.tokens
            if chunk.finish is not None:
                break
    return tokens


async def serve(
    workers: Fleet, lookahead: int, counts: EventCounts, drafter: Drafter | None = None
) -> list[list[int]]:
    """Serve all requests, which arrive one after the other, more urgent ones later; every third
    is cancelled."""
    report = workers.report
    bounds = SchedulerSettings(max_model_len=100, max_batch_size=4, max_batch_tokens=12)
    ledger = KVLedger(
        KVShape(
            report.num_blocks,
            report.block_size,
            report.tiers.num_host_blocks,
            windows=report.windows,
            chunk=bounds.max_batch_tokens * (1 + lookahead),
            num_states=report.num_states,
            num_host_states=report.tiers.num_host_states,
        )
    )
    scheduler = IterationScheduler(bounds, ledger, LowestPriorityFirst(), counts, drafter=drafter)
    executor = FleetExecutor(workers, lookahead)
    engine = Engine(scheduler, executor, asyncio.get_running_loop().time, lookahead=lookahead)
    running = asyncio.create_task(engine.run())
    answers = await asyncio.gather(
        *(read(engine, an_ask(number), 4 if number % 3 == 0 else 99) for number in range(COUNT))
    )
    await engine.drain(30)
    running.cancel()
    executor.close()
    ledger.check()
    assert ledger.num_held == 0
    return answers


@pytest.mark.parametrize(
    ("variant", "stages", "ranks", "lookahead", "host_kv_bytes"),
    [
        ("llama", 1, 2, 1, 0),
        ("llama", 2, 2, 1, 1 << 16),
        ("mistral_window", 1, 1, 1, 1 << 15),
        ("gemma3", 2, 1, 1, 0),  # two layers with a window, one without
        ("qwen3_5", 2, 1, 1, 0),
        ("falcon_h1", 1, 2, 1, 1 << 17),  # KV and states in the same layers
    ],
)
async def test_answers_are_those_of_each_request_alone(
    tmp_path: Path, variant: str, stages: int, ranks: int, lookahead: int, host_kv_bytes: int
) -> None:
    alone = Driver(load_worker(make_checkpoint(tmp_path, variant)))
    expected = [
        alone.generate(number, an_ask(number).prompt, an_ask(number).max_tokens)
        for number in range(COUNT)
    ]
    counts = EventCounts()
    with fleet(
        tmp_path,
        stages,
        ranks,
        kv_slots=52 if alone.worker.report.windows != (None,) else 80,
        num_states=4 if alone.worker.report.num_states else 0,
        lookahead=lookahead,
        host_kv_memory=host_kv_bytes,
    ) as workers:
        answers = await serve(workers, lookahead, counts)
    for number, (answer, whole) in enumerate(zip(answers, expected, strict=True)):
        assert answer == whole[: len(answer)]
        assert len(answer) == len(whole) or number % 3 == 0
    assert counts.num_mixed
    assert counts.num_swaps if host_kv_bytes else counts.num_recomputed


@pytest.mark.parametrize(
    ("variant", "stages", "ranks", "lookahead"),
    [
        ("llama", 2, 1, 0),
        ("llama", 2, 2, 1),
        ("qwen3_5", 2, 1, 1),
    ],
)
async def test_drafts_change_no_answer(
    tmp_path: Path,
    variant: str,
    stages: int,
    ranks: int,
    lookahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Steps are short here: drafts are free, and stay so.
    for name, value in {
        "FIRST_STEPS": 1e9,
        "MAX_STEPS": 1e9,
        "DRAFT_SECONDS": 0,
        "NEWS_SHARE": 0,
    }.items():
        monkeypatch.setattr(f"engine.speculation.budget.{name}", value)
    alone = Driver(load_worker(make_checkpoint(tmp_path, variant)))
    expected = [
        alone.generate(number, an_ask(number).prompt, an_ask(number).max_tokens)
        for number in range(COUNT)
    ]
    drafter = a_drafter(expected)
    with fleet(
        tmp_path, stages, ranks, kv_slots=120, lookahead=lookahead, host_kv_memory=1 << 16
    ) as workers:
        answers = await serve(workers, lookahead, EventCounts(), drafter)
    for answer, whole in zip(answers, expected, strict=True):
        assert answer == whole[: len(answer)]
    assert drafter.counts.num_drafts > drafter.counts.num_accepted > 0
