"""Engines on the same cores take turns by their shares, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import NamedTuple

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import Step, StepResult
from engine.turns import Turn, Turns
from tests.scheduling import HAND_COST, a_spec


class Span(NamedTuple):
    """When an iteration of a group was computed."""

    group: int
    start: float
    end: float


class NotedExecutor(SimulatedExecutor):
    """Notes when its iterations were computed."""

    def __init__(
        self, group: int, seconds: float, spans: list[Span], token_seconds: float = 0.0
    ) -> None:
        super().__init__(CostModel.linear(per_step=seconds, per_token=token_seconds, per_slot=0.0))
        self._group = group
        self._spans = spans

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        result, end = self.run(step, asyncio.get_running_loop().time())
        self._spans.append(Span(self._group, asyncio.get_running_loop().time(), end))
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_at(end, future.set_result, result)
        return future


class Group(NamedTuple):
    seconds: float  # of an iteration
    share: float = 1.0
    token_seconds: float = 0.0  # of each token in an iteration


def an_engine(executor: NotedExecutor, turn: Turn) -> Engine:
    settings = SchedulerSettings(max_model_len=1000, max_batch_size=8, max_batch_tokens=64)
    ledger = KVLedger(KVShape(10_000, 1))
    scheduler = IterationScheduler(settings, ledger, build("fcfs", HAND_COST))
    return Engine(scheduler, executor, asyncio.get_running_loop().time, turn=turn)


Scene = Callable[[list[Engine]], Awaitable[None]]


def play(scene: Scene, *groups: Group) -> list[Span]:
    """Run a scene over one engine for each group, all on the same cores."""
    spans: list[Span] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        turns = Turns(clock)
        engines = [
            an_engine(
                NotedExecutor(index, group.seconds, spans, group.token_seconds),
                turns.join(group.share),
            )
            for index, group in enumerate(groups)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(engine.run()) for engine in engines]
            await scene(engines)
            for task in running:
                task.cancel()

    run_virtual(main())
    return spans


async def generate(engine: Engine, num_tokens: int, prompt_len: int = 4, client: str = "") -> None:
    with engine.stream(a_spec(prompt_len, num_tokens, client=client)) as stream:
        while (await stream.next()).finish is None:
            pass


def seconds_of(spans: list[Span], group: int, until: float) -> float:
    return sum(span.end - span.start for span in spans if span.group == group and span.end <= until)


def test_iterations_of_groups_on_the_same_cores_never_overlap() -> None:
    async def scene(engines: list[Engine]) -> None:
        await asyncio.gather(*(generate(engine, 20) for engine in engines))

    spans = play(scene, Group(0.1), Group(0.03), Group(0.5))

    for before, after in pairwise(spans):
        assert after.start >= before.end - 1e-9, (before, after)
    assert {span.group for span in spans} == {0, 1, 2}


def test_time_is_divided_by_shares_whatever_the_length_of_an_iteration() -> None:
    async def scene(engines: list[Engine]) -> None:
        await asyncio.gather(*(generate(engine, 900) for engine in engines))

    spans = play(scene, Group(0.5, share=1.0), Group(0.01, share=3.0))

    until = next(span.end for span in reversed(spans) if span.group == 1)
    ratio = seconds_of(spans, 1, until) / seconds_of(spans, 0, until)
    assert 2.0 < ratio < 4.0, ratio


def test_an_idle_share_goes_to_whoever_works() -> None:
    async def scene(engines: list[Engine]) -> None:
        await generate(engines[0], 50)

    spans = play(scene, Group(0.1), Group(0.1, share=100.0))

    assert spans[-1].end - spans[0].start < 50 * 0.1 + 1e-6


def test_a_group_that_was_idle_does_not_catch_up_at_the_cost_of_the_others() -> None:
    async def scene(engines: list[Engine]) -> None:
        first = asyncio.create_task(generate(engines[0], 300))
        await asyncio.sleep(20.0)  # meanwhile the second group is idle
        await asyncio.gather(first, generate(engines[1], 50))

    spans = play(scene, Group(0.1), Group(0.1))

    both = [span.group for span in spans if span.start > 20.0][:40]
    assert max(both.count(0), both.count(1)) <= 22, both


def test_a_cancelled_request_leaves_the_turn_to_the_others() -> None:
    async def scene(engines: list[Engine]) -> None:
        working = asyncio.create_task(generate(engines[0], 20))
        await asyncio.sleep(0.15)
        gone = engines[1].stream(a_spec(4, 500))
        with gone:
            pass  # it left before its turn came
        await working
        await generate(engines[1], 3)
        await generate(engines[0], 3)

    assert len(play(scene, Group(0.1), Group(0.1))) == 26


def test_replicas_of_a_model_compute_together_and_take_turns_with_another_model() -> None:
    spans: list[Span] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        turns = Turns(clock)
        model, other = turns.join(), turns.join()
        engines = [
            an_engine(NotedExecutor(group, 0.1, spans), turn)
            for group, turn in ((0, model.part()), (1, model.part()), (2, other))
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(engine.run()) for engine in engines]
            await asyncio.gather(*(generate(engine, 200) for engine in engines))
            for task in running:
                task.cancel()

    run_virtual(main())

    replicas = [span for span in spans if span.group < 2]
    others = [span for span in spans if span.group == 2]
    for span in others:
        for replica in replicas:
            apart = replica.start >= span.end - 1e-9 or replica.end <= span.start + 1e-9
            assert apart, (span, replica)
    together = sum(one.start < two.end and two.start < one.end for one, two in pairwise(replicas))
    assert together > 50, together
    first = [span.group == 2 for span in spans if span.end < 20.0]
    assert 0.2 < sum(first) / len(first) < 0.5, "each model has half of the time"


async def flood(engine: Engine) -> None:
    """One more request when the last one has ended, until it is cancelled."""
    while True:
        await generate(engine, 20, 150, "flood")


def seconds_beside(flooded: list[int], own: int) -> float:
    """How long a prompt of 150 tokens and 20 more take a caller in the model `own`, while another
    one has 12 such requests all the time in each of the `flooded` models, which have 8 seats."""
    took = 0.0

    async def scene(engines: list[Engine]) -> None:
        nonlocal took
        floods = [asyncio.create_task(flood(engines[index])) for index in flooded * 12]
        await asyncio.sleep(3.0)
        began = asyncio.get_running_loop().time()
        await generate(engines[own], 20, 150, "caller")
        took = asyncio.get_running_loop().time() - began
        for each in floods:
            each.cancel()

    play(scene, *TWO_MODELS)
    return took


TWO_MODELS = [Group(0.05, 1.0, 0.004), Group(0.01, 1.0, 0.0005)]
LONGEST = 0.05 + 64 * 0.004  # seconds of an iteration


@pytest.mark.parametrize("own", [0, 1])
def test_a_flood_of_one_model_slows_a_caller_of_another_by_no_more_than_its_share(own: int) -> None:
    alone = seconds_beside([], own)
    beside = seconds_beside([1 - own], own)

    assert 1.5 * alone < beside < 2 * alone + 2 * LONGEST, (alone, beside)


@pytest.mark.parametrize("own", [0, 1])
def test_a_flood_of_all_models_leaves_a_caller_its_share_of_its_models_time(own: int) -> None:
    flooded = seconds_beside([own], own)
    both = seconds_beside([0, 1], own)

    assert both < 2 * flooded + 2 * LONGEST, (flooded, both)
