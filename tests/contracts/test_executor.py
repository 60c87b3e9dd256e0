"""The contract of `StepExecutor`: order, depth, and which futures fail."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from engine.errors import StepFailed, Unavailable, WorkerLost
from engine.ports import StepExecutor, StepFuture
from engine.step import Step, StepId, StepResult
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.worker_settings import WorkerSettings
from tests.engine.transport.workers import REPORT, Command, EchoWorker
from tests.fakes import ScriptedExecutor, a_step
from tests.inline_executor import InlineExecutor

DEPTH = 3
MAX_RESTARTS = 1


@dataclass
class Bench:
    """An executor over an `EchoWorker`; `let_run` makes it run the submitted steps."""

    executor: StepExecutor
    let_run: Callable[[], None] = lambda: None
    can_restart: bool = True
    kill: Callable[[], None] | None = None


def play_echo(executor: ScriptedExecutor) -> None:
    """Resolve the steps in flight as an `EchoWorker` would."""
    worker = EchoWorker(REPORT)
    while executor.in_flight:
        try:
            result = worker.run(executor.in_flight[0])
        except WorkerLost as error:
            executor.lose(str(error))
        except ValueError as error:
            executor.fail(str(error))
        else:
            executor.answer(result.tokens)


@pytest.fixture(params=["inline", "scripted", "1x1", "1x2"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    match request.param:
        case "inline":
            yield Bench(InlineExecutor(EchoWorker(REPORT), depth=DEPTH), can_restart=False)
        case "scripted":
            scripted = ScriptedExecutor(depth=DEPTH, max_restarts=4 * MAX_RESTARTS)
            yield Bench(scripted, lambda: play_echo(scripted), kill=scripted.lose)
        case processes:
            stages, ranks = map(int, processes.split("x"))
            executor = MultiprocessExecutor(
                WorkerSettings(model="echo"),
                MultiprocessSettings(
                    stages,
                    ranks,
                    DEPTH,
                    worker="tests.engine.transport.workers:EchoWorker",
                    max_restarts=MAX_RESTARTS,
                    restart_pause=0.0,
                ),
            )
            await executor.start(lambda what, done, total: None)
            try:
                yield Bench(executor, kill=lambda: os.kill(executor.pids[0], signal.SIGKILL))
            finally:
                await executor.close()


async def settled(future: StepFuture) -> StepResult | BaseException:
    """The result or the error of the future."""
    done = asyncio.Event()
    future.add_done_callback(lambda _: done.set())
    await done.wait()
    try:
        return future.result()
    except (StepFailed, WorkerLost) as error:
        return error


async def run_all(bench: Bench, *steps: Step) -> list[StepResult | BaseException]:
    futures = [bench.executor.submit(step) for step in steps]
    bench.let_run()
    return [await settled(future) for future in futures]


async def test_a_result_has_one_token_per_sampling_entry(bench: Bench) -> None:
    (result,) = await run_all(bench, a_step(7, 10, 20, 30))
    assert isinstance(result, StepResult)
    assert (result.step_id, result.tokens) == (7, (11, 21, 31))


async def test_submit_returns_before_the_result(bench: Bench) -> None:
    future = bench.executor.submit(a_step(1, 10))
    assert not future.done()
    bench.let_run()
    assert isinstance(await settled(future), StepResult)


async def test_depth_steps_are_accepted_at_once_and_finish_in_order(bench: Bench) -> None:
    assert bench.executor.depth == DEPTH
    order: list[StepId] = []
    futures = [bench.executor.submit(a_step(step_id, step_id)) for step_id in range(DEPTH)]
    for future in futures:
        future.add_done_callback(lambda done: order.append(done.result().step_id))
    bench.let_run()
    assert [await settled(future) for future in futures] == [f.result() for f in futures]
    assert order == list(range(DEPTH))


async def test_a_step_beyond_depth_is_an_assertion_error(bench: Bench) -> None:
    futures = [bench.executor.submit(a_step(step_id, 1)) for step_id in range(DEPTH)]
    with pytest.raises(AssertionError, match="depth"):
        bench.executor.submit(a_step(DEPTH, 1))
    bench.let_run()
    for future in futures:
        await settled(future)


async def test_a_done_callback_may_submit_the_next_step(bench: Bench) -> None:
    results: list[StepResult] = []
    third = asyncio.Event()

    def submit(step_id: int) -> None:
        future = bench.executor.submit(a_step(step_id, step_id))
        future.add_done_callback(lambda done: go_on(done.result()))

    def go_on(result: StepResult) -> None:
        results.append(result)
        if len(results) == DEPTH * 2:
            third.set()
        elif result.step_id + DEPTH < DEPTH * 2:
            submit(result.step_id + DEPTH)
            bench.let_run()

    for step_id in range(DEPTH):
        submit(step_id)
    bench.let_run()
    await third.wait()
    assert [result.step_id for result in results] == list(range(DEPTH * 2))


async def test_a_step_that_raises_fails_only_its_own_future(bench: Bench) -> None:
    before, raised, after = await run_all(
        bench, a_step(1, 10), a_step(2, Command.RAISE), a_step(3, 30)
    )
    assert isinstance(before, StepResult)
    assert isinstance(raised, StepFailed)
    assert "a step" in str(raised)
    assert isinstance(after, StepResult)
    assert after.tokens == (31,)


async def test_a_worker_that_dies_while_idle_is_reported_at_once(bench: Bench) -> None:
    if bench.kill is None:
        pytest.skip("this worker can only die in a step")
    reported = asyncio.Event()
    bench.executor.watch(reported.set)
    bench.kill()
    await reported.wait()
    assert not bench.executor.is_alive


async def test_a_lost_worker_is_not_alive_until_a_restart_after_which_steps_run(
    bench: Bench,
) -> None:
    assert bench.executor.is_alive
    lost, after = await run_all(bench, a_step(1, Command.LOSE), a_step(3, 30))
    assert isinstance(lost, WorkerLost)
    assert isinstance(after, WorkerLost)
    assert not bench.executor.is_alive
    late = bench.executor.submit(a_step(4, 40))
    assert late.done()
    assert isinstance(await settled(late), WorkerLost)
    if not bench.can_restart:
        with pytest.raises(Unavailable):
            await bench.executor.restart()
        return
    await bench.executor.restart()
    assert bench.executor.is_alive
    (result,) = await run_all(bench, a_step(2, 20))
    assert isinstance(result, StepResult)
    assert result.tokens == (21,)


async def test_steps_that_crash_every_worker_do_not_end_the_executor(bench: Bench) -> None:
    if not bench.can_restart:
        pytest.skip("this executor cannot restart its worker")
    for step_id in range(2 * MAX_RESTARTS):
        await run_all(bench, a_step(step_id, Command.LOSE))
        await bench.executor.restart()
    assert bench.executor.is_alive


async def test_a_cancelled_future_does_not_affect_the_next_step(bench: Bench) -> None:
    cancelled = bench.executor.submit(a_step(1, 10))
    kept = bench.executor.submit(a_step(2, 20))
    assert isinstance(cancelled, asyncio.Future)
    cancelled.cancel()
    bench.let_run()
    result = await settled(kept)
    assert isinstance(result, StepResult)
    assert result.tokens == (21,)
