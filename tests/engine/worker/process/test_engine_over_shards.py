"""The engine over many workers, with too few KV blocks: outputs are those of lone requests.

Prompts in pieces beside decodes, clients that leave, preemption by swapping and by computing anew,
each with several iterations in flight.
"""

from pathlib import Path
from random import Random

import pytest

from engine.iteration import Iteration, Observer
from engine.loop import Engine
from engine.policy.priority import LowestPriorityFirst
from engine.request import RequestSpec
from engine.speculation.drafter import Drafter
from engine.step import SamplingParams
from tests.engine.worker.process.driving import Driver, load_worker
from tests.engine.worker.process.fleet import Fleet, FleetExecutor, fleet
from tests.inline import RequestOutcome, engine_over, read_all, serve
from tests.models.checkpoints import make_checkpoint
from tests.models.drafts import a_drafter

COUNT = 6


class MixedSteps(Observer):
    """Counts steps of decodes beside pieces of prompts."""

    count = 0

    def planned(self, iteration: Iteration, now: float) -> None:
        lengths = [len(entry.tokens) for entry in iteration.step.entries]
        self.count += min(lengths, default=1) == 1 < max(lengths, default=1)


def an_ask(number: int) -> RequestSpec:
    prompt = Random(number).choices(range(97), k=3 + 5 * number % 31)
    return RequestSpec(
        tuple(prompt),
        12 + 3 * number % 17,
        SamplingParams(temperature=0.0),
        priority=COUNT - number,
    )


def answers_alone(driver: Driver) -> list[list[int]]:
    return [
        driver.generate(number, an_ask(number).prompt, an_ask(number).max_tokens)
        for number in range(COUNT)
    ]


async def answers_of(
    workers: Fleet, *, lookahead: int, drafter: Drafter | None = None
) -> list[RequestOutcome]:
    """Serve all requests, which arrive one after the other, more urgent ones later; every third
    is cancelled."""
    executor, mixed = FleetExecutor(workers, lookahead), MixedSteps()
    engine = engine_over(
        workers.report,
        executor,
        lookahead=lookahead,
        drafter=drafter,
        policy=LowestPriorityFirst(),
        observer=mixed,
        max_batch_size=4,
        max_batch_tokens=12,
    )

    async def client(engine: Engine, spec: RequestSpec) -> RequestOutcome:
        return await read_all(engine, spec, None if (COUNT - spec.priority) % 3 else 4)

    answers = await serve(engine, [an_ask(number) for number in range(COUNT)], client)
    executor.close()
    assert mixed.count
    return answers


@pytest.mark.parametrize(
    ("variant", "stages", "ranks", "host_kv_bytes"),
    [
        ("llama", 1, 2, 0),
        ("llama", 2, 2, 1 << 16),
        ("mistral_window", 1, 1, 1 << 15),
        ("gemma3", 2, 1, 0),  # two layers with a window, one without
        ("qwen3_5", 2, 1, 0),
        ("falcon_h1", 1, 2, 1 << 17),  # KV and states in the same layers
    ],
)
async def test_answers_are_those_of_each_request_alone(
    tmp_path: Path, variant: str, stages: int, ranks: int, host_kv_bytes: int
) -> None:
    alone = Driver(load_worker(make_checkpoint(tmp_path, variant)))
    expected = answers_alone(alone)
    with fleet(
        tmp_path,
        stages,
        ranks,
        kv_slots=52 if alone.worker.report.windows != (None,) else 80,
        num_states=4 if alone.worker.report.num_states else 0,
        lookahead=1,
        host_kv_memory=host_kv_bytes,
    ) as workers:
        answers = await answers_of(workers, lookahead=1)
    for number, (answer, whole) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens == whole[: len(answer.tokens)]
        assert len(answer.tokens) == len(whole) or number % 3 == 0
    setbacks = [answer.request.setbacks for answer in answers]
    name = "num_swaps" if host_kv_bytes else "num_preemptions"
    assert any(getattr(each, name) for each in setbacks)


@pytest.mark.parametrize(
    ("variant", "stages", "ranks", "lookahead"),
    [("llama", 2, 1, 0), ("llama", 2, 2, 1), ("qwen3_5", 2, 1, 1)],
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
    free = {"FIRST_STEPS": 1e9, "MAX_STEPS": 1e9, "DRAFT_SECONDS": 0, "NEWS_SHARE": 0}
    for name, value in free.items():
        monkeypatch.setattr(f"engine.speculation.budget.{name}", value)
    expected = answers_alone(Driver(load_worker(make_checkpoint(tmp_path, variant))))
    drafter = a_drafter(expected)
    with fleet(
        tmp_path, stages, ranks, kv_slots=120, lookahead=lookahead, host_kv_memory=1 << 16
    ) as workers:
        answers = await answers_of(workers, lookahead=lookahead, drafter=drafter)
    for answer, whole in zip(answers, expected, strict=True):
        assert answer.tokens == whole[: len(answer.tokens)]
    assert drafter.counts.num_drafts > drafter.counts.num_accepted > 0
