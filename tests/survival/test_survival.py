import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED
from engine.errors import EngineError, Unavailable, WorkerLost
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.stream import TokenStream
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.worker_settings import WorkerSettings
from tests.survival.workers import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, Poison

WORKER = MultiprocessSettings(
    worker="tests.survival.workers:DigestWorker", close_seconds=1.0, restart_pause=0.0
)
NUM_STREAMS = 12
OnTokens = Callable[[int, int], object]  # stream, tokens so far


@dataclass
class Served:
    """An engine over worker processes."""

    engine: Engine
    executor: MultiprocessExecutor

    @property
    def num_restarts(self) -> int:
        return self.executor.num_restarts

    def kill(self, number: int = signal.SIGKILL, which: int = 0) -> None:
        """Send a worker a signal, if there is one, and wait for the end of a killed one."""
        if self.executor.pids:
            pid = self.executor.pids[which]
            os.kill(pid, number)
            if number == signal.SIGKILL:  # a busy machine may take longer than the streams
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@asynccontextmanager
async def served(
    directory: Path,
    lookahead: int,
    settings: MultiprocessSettings = WORKER,
) -> AsyncIterator[Served]:
    """An engine whose pool and KV ledger must be empty at the end."""
    settings = replace(settings, depth=settings.num_stages + lookahead)
    executor = MultiprocessExecutor(WorkerSettings(model=str(directory)), settings)
    await executor.start(lambda what, done, total: None)
    bounds = SchedulerSettings(max_model_len=MAX_MODEL_LEN, max_batch_size=8, max_batch_tokens=24)
    cost = LiveCost(UNMEASURED)
    ledger = KVLedger(KVShape(NUM_BLOCKS, BLOCK_SIZE))
    scheduler = IterationScheduler(bounds, ledger, FirstComeFirstServed(), cost=cost)
    clock = asyncio.get_running_loop().time
    engine = Engine(scheduler, executor, clock, lookahead=lookahead)
    running = asyncio.create_task(engine.run())
    try:
        yield Served(engine, executor)
        await engine.drain(30)
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await executor.close()
    scheduler.ledger.check()
    assert not scheduler.pool
    assert scheduler.ledger.num_held == 0


def a_spec(number: int) -> RequestSpec:
    """Prompts of 1 to 60 tokens with shared prefixes, outputs of 5 to 60 tokens."""
    prompt = (*[100 + at % 7 for at in range(1 + 11 * number % 60)], number)
    penalty = 0.5 if number % 3 == 0 else 0.0
    sampling = SamplingParams(seed=number, presence_penalty=penalty)
    return RequestSpec(prompt, 5 + 17 * number % 56, sampling)


async def read(stream: TokenStream, on_count: Callable[[int], object]) -> list[int]:
    """All tokens; `on_count` is called with the number of tokens after each chunk."""
    tokens: list[int] = []
    while True:
        chunk = await stream.next()
        tokens += chunk.tokens
        on_count(len(tokens))
        if chunk.finish is not None:
            return tokens


async def all_outputs(
    served: Served, on_tokens: OnTokens = lambda stream, count: None
) -> list[list[int]]:
    """The tokens of all streams, which run at the same time."""

    async def one(number: int) -> list[int]:
        with served.engine.stream(a_spec(number)) as stream:
            return await read(stream, lambda count: on_tokens(number, count))

    return await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))


@pytest.fixture(scope="module", name="undisturbed")
def _undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    async def main() -> list[list[int]]:
        async with served(tmp_path_factory.mktemp("quiet"), lookahead=0) as quiet:
            return await all_outputs(quiet)

    texts = asyncio.run(main())
    assert [len(text) for text in texts] == [a_spec(n).max_tokens for n in range(NUM_STREAMS)]
    return texts


@pytest.mark.parametrize(("lookahead", "how"), [(0, "killed"), (1, "killed"), (1, "stopped")])
async def test_streams_continue_when_their_worker_dies_in_decodes(
    tmp_path: Path, undisturbed: list[list[int]], lookahead: int, how: str
) -> None:
    """The worker is killed, or stopped until the step's time limit, three times."""
    settings = replace(WORKER, step_seconds=0.5)
    async with served(tmp_path, lookahead, settings) as lively:
        deaths = {(3, 2), (5, 9), (6, 30)}

        def on_tokens(stream: int, count: int) -> None:
            if any(stream == other and count >= at for other, at in deaths):
                deaths.difference_update({(other, at) for other, at in deaths if other == stream})
                lively.kill(signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        assert await all_outputs(lively, on_tokens) == undisturbed
        assert not deaths
        assert 1 <= lively.num_restarts <= 3


async def test_any_worker_of_two_stages_and_two_ranks_may_die(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    settings = replace(WORKER, num_stages=2, num_ranks=2)
    async with served(tmp_path, 1, settings) as lively:
        victims = {3: 0, 5: 1, 6: 3}  # by stream

        def on_tokens(stream: int, count: int) -> None:
            if count > 4 * stream and stream in victims:
                lively.kill(which=victims.pop(stream))

        assert await all_outputs(lively, on_tokens) == undisturbed
        assert not victims
        assert len(lively.executor.pids) == 4
        assert 1 <= lively.num_restarts <= 3


async def test_streams_continue_when_the_restarted_worker_dies_while_it_loads(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    async with served(tmp_path, 1) as lively:
        killed: list[int] = []

        def on_tokens(stream: int, count: int) -> None:
            if stream == 4 and count >= 3 and not killed:
                killed.append(count)
                (tmp_path / "die").touch()
                lively.kill()

        assert await all_outputs(lively, on_tokens) == undisturbed
        assert lively.num_restarts == 2


async def test_a_drain_continues_across_a_lost_worker(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    async with served(tmp_path, 1) as lively:
        drains: list[asyncio.Task[None]] = []

        def on_tokens(stream: int, count: int) -> None:
            if stream == 4 and count >= 3 and not drains:
                drains.append(asyncio.create_task(lively.engine.drain(30)))
                lively.kill()

        assert await all_outputs(lively, on_tokens) == undisturbed
        await drains[0]
        assert lively.num_restarts == 1


async def test_a_worker_that_is_killed_again_and_again_fails_no_stream(
    tmp_path: Path, undisturbed: list[list[int]]
) -> None:
    """More kills than `max_restarts`, each after some tokens of every stream."""
    async with served(tmp_path, 1, replace(WORKER, max_restarts=1)) as lively:
        produced = [0] * NUM_STREAMS  # calls
        at_last_kill = [0] * NUM_STREAMS
        num_kills = 0

        def on_tokens(stream: int, count: int) -> None:
            nonlocal at_last_kill, num_kills
            produced[stream] += 1
            live = [n for n in range(NUM_STREAMS) if n not in ended]
            ended.update([stream] if count >= a_spec(stream).max_tokens else [])
            if num_kills < 5 and all(produced[n] > at_last_kill[n] for n in live):
                at_last_kill = list(produced)
                num_kills += 1
                lively.kill()

        ended: set[int] = set()
        assert await all_outputs(lively, on_tokens) == undisturbed
        assert num_kills > 2  # a worker that is down already may be killed once more
        assert lively.num_restarts > 1  # `max_restarts`


async def error_of_poisoned_request(
    served: Served, poison: Poison, undisturbed: list[list[int]]
) -> EngineError | None:
    """The error of the request with the poison token; all other requests must finish."""

    async def poisoned() -> EngineError | None:
        try:
            with served.engine.stream(replace(a_spec(0), prompt=(1, 2, poison))) as stream:
                await read(stream, lambda count: None)
        except EngineError as error:
            return error
        return None

    ended = asyncio.create_task(poisoned())
    assert await all_outputs(served) == undisturbed
    return await ended


@pytest.mark.parametrize("poison", Poison)
async def test_a_request_that_ends_workers_is_isolated_within_three_restarts(
    tmp_path: Path, undisturbed: list[list[int]], poison: Poison
) -> None:
    settings = replace(WORKER, step_seconds=0.5)
    async with served(tmp_path, 1, settings) as lively:
        error = await error_of_poisoned_request(lively, poison, undisturbed)
        assert isinstance(error, WorkerLost)
        assert "worker died each time" in str(error)
        assert lively.num_restarts <= 3
        assert lively.engine.is_ready


async def test_beyond_the_limit_every_stream_fails_and_new_ones_are_rejected(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, 1, replace(WORKER, max_restarts=1)) as lively:
        (tmp_path / "refuse").touch()

        def on_tokens(stream: int, count: int) -> None:
            if stream == 4 and count >= 3:
                lively.kill()

        with pytest.raises(Unavailable, match="has no worker: the worker was restarted"):
            await all_outputs(lively, on_tokens)
        assert not lively.engine.is_ready
        assert lively.engine.failed.is_set()
        with pytest.raises(Unavailable, match="has no worker"):
            lively.engine.stream(a_spec(1)).__enter__()
