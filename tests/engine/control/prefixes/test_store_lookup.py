import asyncio
from collections.abc import Callable, Container, Coroutine, Sequence

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.kv.ledger import KVLedger
from engine.kv.prefix import hash_blocks, name_in_group
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import PageKind, Step, Tier
from engine.stream import TokenStream
from tests.scheduling import GREEDY

BLOCK = 4
PROMPT = tuple(range(100, 117))
ONE_SECOND = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)


class Lookup:
    """Answers after some seconds with the names that it has."""

    def __init__(self, names: Sequence[bytes], seconds: float = 0.5) -> None:
        self.names = set(names)
        self.seconds = seconds
        self.asked: list[Sequence[bytes]] = []

    async def find(self, names: Sequence[bytes]) -> Container[bytes]:
        self.asked.append(names)
        await asyncio.sleep(self.seconds)
        return self.names


class Recording(SimulatedExecutor):
    """Keeps the steps and their times."""

    def __init__(self) -> None:
        super().__init__(ONE_SECOND)
        self.steps: list[tuple[float, Step]] = []

    def submit(self, step: Step) -> "asyncio.Future[object]":  # type: ignore[override]
        self.steps.append((asyncio.get_running_loop().time(), step))
        return super().submit(step)  # type: ignore[return-value]


def scheduler(num_states: int = 0, windows: tuple[int | None, ...] = (None,)) -> IterationScheduler:
    settings = SchedulerSettings(max_model_len=64, max_batch_size=4, max_batch_tokens=64)
    ledger = KVLedger(
        KVShape(60, BLOCK, windows=windows, chunk=64, num_states=num_states, num_store_names=100)
    )
    return IterationScheduler(settings, ledger, FirstComeFirstServed())


def serve(
    lookup: Lookup,
    found: IterationScheduler,
    client: Callable[[Engine], Coroutine[None, None, None]],
) -> Recording:
    executor = Recording()

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        engine = Engine(found, executor, clock, lookup=lookup)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            await client(engine)
            await asyncio.sleep(5)
            running.cancel()

    run_virtual(main())
    found.ledger.check()
    assert found.ledger.num_held == 0
    return executor


async def finish(stream: TokenStream) -> None:
    while (await stream.next()).finish is None:
        pass


async def one_request(engine: Engine) -> None:
    with engine.stream(RequestSpec(PROMPT, 1, GREEDY)) as stream:
        await finish(stream)


def test_what_the_store_has_is_loaded_by_the_first_step() -> None:
    hashes, found = hash_blocks("", PROMPT, BLOCK), scheduler()
    lookup = Lookup(hashes[:3])
    executor = serve(lookup, found, one_request)
    assert lookup.asked == [hashes]
    at, step = executor.steps[0]
    assert at == 0.5
    assert [len(entry.tokens) for entry in step.entries] == [5]
    assert [(move.tier, move.num_blocks) for move in step.moves] == [(Tier.STORE, 3)]


def test_a_snapshot_in_the_store_is_loaded_with_its_blocks() -> None:
    hashes, found = hash_blocks("", PROMPT, BLOCK), scheduler(num_states=4)
    snapshot = name_in_group(hashes[1], 1)
    executor = serve(Lookup([*hashes, snapshot]), found, one_request)
    (_, step), *_ = executor.steps
    moves = [(move.kind, move.num_blocks) for move in step.moves]
    assert sorted(moves) == [(PageKind.BLOCK, 2), (PageKind.SNAPSHOT, 1)]
    assert [len(entry.tokens) for entry in step.entries] == [9]


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_without_an_answer_the_prompt_is_computed(windows: tuple[int | None, ...]) -> None:
    executor = serve(Lookup([]), scheduler(windows=windows), one_request)
    assert [len(entry.tokens) for entry in executor.steps[0][1].entries] == [17]


def test_other_requests_go_on_meanwhile() -> None:
    async def two_requests(engine: Engine) -> None:
        short = RequestSpec((1,), 3, GREEDY)  # no block to look up
        with engine.stream(short) as one, engine.stream(RequestSpec(PROMPT, 1, GREEDY)) as other:
            await asyncio.gather(finish(one), finish(other))

    executor = serve(Lookup([], seconds=1.5), scheduler(), two_requests)
    assert [(at, len(step.entries)) for at, step in executor.steps[:3]] == [
        (0.0, 1),
        (1.0, 1),
        (2.0, 2),
    ]


def test_a_request_that_leaves_meanwhile_frees_everything() -> None:
    async def leave(engine: Engine) -> None:
        with engine.stream(RequestSpec(PROMPT, 1, GREEDY)):
            await asyncio.sleep(0.1)
        await one_request(engine)

    hashes = hash_blocks("", PROMPT, BLOCK)
    executor = serve(Lookup(hashes), scheduler(), leave)
    assert executor.steps[0][1].moves
