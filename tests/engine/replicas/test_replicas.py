"""Replicas of one model behind one queue, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.errors import Overloaded, Unavailable
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.replicas.placement import Load, least_growth
from engine.replicas.replica import MIN_FIRST, QueueDelay, Replica
from engine.replicas.replicas import Replicas
from engine.request import Caching, Request, RequestSpec
from engine.simulated.virtual_loop import run_virtual
from engine.step import SamplingParams
from tests.fuzz.groups.case import MortalExecutor, Tally, expected_tokens

# An iteration takes a second, and a tenth of a second for each of its tokens.
COST = CostModel.linear(per_step=1.0, per_token=0.1, per_slot=0.0)
GREEDY = SamplingParams(temperature=0.0)
SEATS = 2


class Rig(NamedTuple):
    """Replicas whose workers a test can kill."""

    replicas: Replicas
    members: list[Replica]
    executors: list[MortalExecutor]

    @property
    def sizes(self) -> list[int]:
        """The live requests of each replica."""
        return [len(engine.scheduler.pool) for engine in self.replicas.engines]


def play(
    scene: Callable[[Rig], Awaitable[None]],
    count: int = 2,
    *,
    seats: int = SEATS,
    max_queue_requests: int = 100,
    restarts: Sequence[bool] = (True, True),
) -> None:
    """Run a scene over `count` replicas with seats for `seats` requests each."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        settings = SchedulerSettings(
            1000, max_batch_size=seats, max_queue_requests=max_queue_requests
        )
        members, executors = [], []
        for index in range(count):
            cost, delay = LiveCost(COST), QueueDelay(COST, seats)
            executor = MortalExecutor(COST, Tally(), partial(restarts.__getitem__, index))
            ledger = KVLedger(KVShape(100, 4))
            scheduler = IterationScheduler(settings, ledger, build("fcfs", cost), delay, cost)
            members.append(Replica(Engine(scheduler, executor, clock), delay))
            executors.append(executor)
        replicas = Replicas(members, clock)
        running = asyncio.create_task(replicas.run())
        await scene(Rig(replicas, members, executors))
        running.cancel()

    run_virtual(main())


def a_prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + length))


async def generate(rig: Rig, prompt: tuple[int, ...], max_tokens: int, key: str = "") -> int:
    """The tokens of the prompt that were cached; the output is as it must be."""
    spec = RequestSpec(prompt, max_tokens, GREEDY, caching=Caching(key=key))
    with rig.replicas.stream(spec) as stream:
        tokens: list[int] = []
        finish = None
        while finish is None:
            chunk = await stream.next()
            tokens += chunk.tokens
            finish = chunk.finish
        assert tokens == expected_tokens(stream.request.request_id, spec)
        return stream.request.num_cached


def test_a_cached_prefix_is_followed_until_its_replica_has_more_to_do_than_it_saves() -> None:
    cached, idle = Load(3.0, 2, prefill=1.0), Load(0.0, 0, prefill=5.0)
    assert least_growth([idle, cached]) == 0  # 5 seconds against 3 + 1 * 3
    assert least_growth([idle, cached._replace(delay=1.0)]) == 1
    assert least_growth([idle, idle]) == 0


def test_requests_go_to_the_replica_that_has_their_prefix() -> None:
    async def scene(rig: Rig) -> None:
        prompts = a_prompt(40), a_prompt(40, first=100)
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(generate(rig, prompt, 2))
        for prompt in prompts * 3:
            assert await generate(rig, (*prompt, 7), 2) == 40
        assert rig.replicas.moves.num_moved == 0

    play(scene)


@pytest.mark.parametrize(
    ("key", "cached"),
    [
        ("", [80, 0]),  # the second follows the first; for the third that would take too long
        ("other", [0, 80]),  # the third follows the second
    ],
)
def test_a_request_follows_the_first_live_one_that_begins_like_it_and_has_its_key(
    key: str, cached: list[int]
) -> None:
    async def scene(rig: Rig) -> None:
        long = [asyncio.create_task(generate(rig, a_prompt(4, 900 * n), 60)) for n in (1, 2)]
        await asyncio.sleep(0.1)
        first = asyncio.create_task(generate(rig, (*a_prompt(80), 7), 2))
        await asyncio.sleep(0.1)
        assert rig.sizes == [2, 1]
        others = [asyncio.create_task(generate(rig, (*a_prompt(80), n), 2, key)) for n in (8, 9)]
        await asyncio.sleep(0.1)  # the prompt of the first one is still being computed
        assert rig.sizes == ([2, 3] if key else [3, 2])
        assert await asyncio.gather(*others) == cached
        await asyncio.gather(first, *long)

    play(scene, seats=8)


def test_it_is_forgotten_which_requests_began_alike_once_they_have_ended() -> None:
    async def scene(rig: Rig) -> None:
        for n in range(4 * MIN_FIRST):
            await generate(rig, a_prompt(8, 10 * n), 1)
        (replica,) = rig.members
        assert len(replica.beginnings) <= MIN_FIRST + 3

    play(scene, 1)


def test_a_waiting_request_moves_to_a_replica_that_has_become_idle() -> None:
    async def scene(rig: Rig) -> None:
        prompt = a_prompt(40)
        await generate(rig, prompt, 1)
        long = [asyncio.create_task(generate(rig, prompt, 100)) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert rig.sizes == [2, 0]
        short = asyncio.create_task(generate(rig, a_prompt(60, 500), 2))
        await asyncio.sleep(0.1)
        more = [asyncio.create_task(generate(rig, a_prompt(4, 100 + n), 50)) for n in range(6)]
        await asyncio.sleep(0.1)
        assert sum(rig.sizes) == 9
        await asyncio.gather(*long, short, *more)
        assert rig.replicas.moves.num_moved > 0

    play(scene)


def test_a_plan_searches_the_caches_for_its_own_replica_and_not_for_all_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[Request] = []
    prefill = Replica.prefill

    def counted(replica: Replica, request: Request) -> float:
        searched.append(request)
        return prefill(replica, request)

    async def scene(rig: Rig) -> None:
        most: list[int] = []
        for engine in rig.replicas.engines:

            def balanced(balance: Callable[[], object] = engine.on_planned) -> None:
                before = len(searched)
                balance()
                most.append(len(searched) - before)

            engine.on_planned = balanced
        work = [asyncio.create_task(generate(rig, a_prompt(250, 300 * n), 50)) for n in range(9)]
        await asyncio.sleep(0.1)
        assert sorted(rig.sizes) == [1, 1, 1, 2, 2, 2]  # there is no KV for the second ones
        most.clear()
        await asyncio.gather(*work)
        assert 3 < max(most) <= 6

    monkeypatch.setattr(Replica, "prefill", counted)
    play(scene, 6, restarts=(True,) * 6)


def test_the_requests_of_a_dead_replica_go_on_at_another_one_with_the_same_tokens() -> None:
    async def scene(rig: Rig) -> None:
        tasks = [asyncio.create_task(generate(rig, a_prompt(8, 100 * n), 20)) for n in range(2)]
        await asyncio.sleep(5.0)
        assert rig.sizes == [1, 1]
        rig.executors[0].kill()
        await asyncio.sleep(0.1)
        assert rig.sizes == [0, 2]
        assert rig.replicas.rejection() is None
        await asyncio.gather(*tasks)

    play(scene)


def test_a_replica_that_cannot_be_restarted_leaves_its_requests_to_the_others() -> None:
    async def scene(rig: Rig) -> None:
        tasks = [asyncio.create_task(generate(rig, a_prompt(8, 100 * n), 20)) for n in range(8)]
        await asyncio.sleep(5.0)
        rig.executors[0].kill()
        await asyncio.gather(*tasks)
        assert not rig.replicas.failed.is_set()
        assert rig.replicas.failure is None
        await generate(rig, a_prompt(8), 2)

    play(scene, restarts=(False, True))


def test_without_a_replica_that_can_be_restarted_requests_fail_with_the_reason() -> None:
    async def scene(rig: Rig) -> None:
        task = asyncio.create_task(generate(rig, a_prompt(8), 20))
        await asyncio.sleep(5.0)
        for executor in rig.executors:
            executor.kill()
        with pytest.raises(Unavailable, match="again and again"):
            await task
        assert rig.replicas.failed.is_set()
        assert "again and again" in str(rig.replicas.failure)
        with pytest.raises(Unavailable, match="again and again"):
            await generate(rig, a_prompt(8), 2)

    play(scene, restarts=(False, False))


def test_the_bound_of_the_queue_is_for_the_requests_of_all_replicas() -> None:
    async def scene(rig: Rig) -> None:
        tasks = [asyncio.create_task(generate(rig, a_prompt(4, 10 * n), 5)) for n in range(4)]
        await asyncio.sleep(2.0)
        tasks += [asyncio.create_task(generate(rig, a_prompt(4, 10 * n), 5)) for n in range(4, 8)]
        await asyncio.sleep(0.0)
        with pytest.raises(Overloaded, match="4 requests"):
            await generate(rig, a_prompt(4), 5)
        await asyncio.gather(*tasks)

    play(scene, max_queue_requests=4)


def test_a_request_is_cancelled_at_the_replica_that_it_has_moved_to() -> None:
    async def scene(rig: Rig) -> None:
        spec = RequestSpec(a_prompt(8), 50, GREEDY, label="one")
        with rig.replicas.stream(spec) as stream:
            await stream.next()
            rig.executors[0].kill()
            await asyncio.sleep(0.1)
            assert rig.sizes == [0, 1]
        assert rig.sizes == [0, 1]  # until its iteration has returned
        await asyncio.sleep(3.0)
        assert rig.sizes == [0, 0]

    play(scene)
