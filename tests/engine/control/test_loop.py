"""The engine in virtual time: exact times, every way to cancel, worker crashes."""

import asyncio

import pytest

from engine.errors import DeadlineExceeded, EngineError, StepFailed, Unavailable
from engine.loop import Engine
from engine.request import Abort, FinishReason, RequestSpec, State
from engine.simulated.executor import SimulatedExecutor
from engine.step import StepEntry
from tests.engine.control.served_loop import GREEDY, ONE_SECOND, Mortal, now, read, serve


def test_tokens_are_delivered_when_their_iterations_return() -> None:
    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,) * 12, 3, GREEDY)) as stream:
            instants = []
            chunk = await stream.next()
            while chunk.finish is None:
                instants.append(now())
                chunk = await stream.next()
            assert [*instants, now()] == [2.0, 3.0, 4.0]
            assert chunk.finish is FinishReason.LENGTH

    serve(client)


def test_a_slow_reader_gets_its_tokens_merged() -> None:
    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
            await asyncio.sleep(3.5)
            assert len((await stream.next()).tokens) == 3
            chunk = await stream.next()
            assert len(chunk.tokens) == 1
            await asyncio.sleep(5)
            assert (await stream.next()).finish is FinishReason.LENGTH

    serve(client)


def test_a_late_request_joins_the_running_batch() -> None:
    async def client(engine: Engine) -> None:
        async def late() -> float:
            await asyncio.sleep(1.5)
            with engine.stream(RequestSpec((1,), 1, GREEDY)) as stream:
                await read(stream)
            return now()

        task = asyncio.create_task(late())
        with engine.stream(RequestSpec((1,), 9, GREEDY)) as stream:
            await read(stream)
            assert now() == 9.0
        assert await task == 3.0

    serve(client)


@pytest.mark.parametrize("leave_at", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_cancelling_at_any_time_frees_all_blocks_and_affects_no_other_request(
    leave_at: float,
) -> None:
    """At once, in the first and second chunk of a prefill, in a decode, between iterations."""
    texts: dict[bool, list[int]] = {}

    for leaves in (False, True):

        async def client(engine: Engine, leaves: bool = leaves) -> None:
            async def leaver() -> None:
                with engine.stream(RequestSpec((1,) * 12, 50, GREEDY)) as stream:
                    await asyncio.sleep(leave_at)
                    stream.close(Abort.EXPLICIT)
                    assert stream.request.state in (State.CANCELLED, State.LEAVING)

            with engine.stream(RequestSpec((2,), 6, GREEDY)) as stream:
                task = asyncio.create_task(leaver()) if leaves else None
                texts[leaves] = await read(stream)
                if task is not None:
                    await task

        serve(client)
    assert texts[False] == texts[True]


def test_cancelling_the_reading_task_ends_its_request() -> None:
    async def client(engine: Engine) -> None:
        async def reader() -> None:
            with engine.stream(
                RequestSpec((1,), 400, GREEDY),
            ) as stream:
                await read(stream)

        task = asyncio.create_task(reader())
        await asyncio.sleep(2.5)
        task.cancel()
        await asyncio.wait([task])
        assert engine.scheduler.pool.count(State.LEAVING) == 1
        await asyncio.sleep(1)
        assert not engine.scheduler.pool

    serve(client, num_blocks=500)


def test_a_rejected_request_holds_no_blocks() -> None:
    async def client(engine: Engine) -> None:
        with pytest.raises(EngineError), engine.stream(RequestSpec((1,) * 499, 2, GREEDY)):
            pytest.fail("it was accepted")

    serve(client)


def test_a_failed_step_fails_its_batch_and_the_engine_continues() -> None:
    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
            first = await stream.next()
            assert len(first.tokens) == 1
            with pytest.raises(StepFailed, match="the step failed"):
                await read(stream)
        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
            assert len(await read(stream)) == 5

    serve(client, Mortal(fails=(1,)))


def test_requests_continue_after_a_worker_crash() -> None:
    answers: list[list[int]] = []
    for dies in ((), (2,)):

        async def client(engine: Engine) -> None:
            with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
                answers.append(await read(stream))

        serve(client, Mortal(dies=dies))
    assert answers[0] == answers[1]
    assert len(answers[0]) == 5


def test_while_the_worker_restarts_new_requests_are_rejected_and_live_ones_can_be_cancelled() -> (
    None
):
    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,), 5, GREEDY)):
            await asyncio.sleep(4)
            assert not engine.is_ready
            assert retry_after(engine) == 2.0  # 5 s were expected, and 3 are over
        await asyncio.sleep(10)
        assert engine.is_ready

    serve(client, Mortal(dies=(1,)))


@pytest.mark.parametrize("deadline", [1.5, 5.0])
def test_a_deadline_is_reported_when_it_passes_also_while_the_worker_restarts(
    deadline: float,
) -> None:
    """The worker dies at 1 s and needs 10 s to restart."""

    async def client(engine: Engine) -> None:
        clock = asyncio.get_running_loop().time
        with engine.stream(RequestSpec((1,), 9, GREEDY, deadline=deadline)) as stream:
            await stream.next()
            with pytest.raises(DeadlineExceeded):
                await stream.next()
            assert clock() == deadline
        await asyncio.sleep(20)

    serve(client, Mortal(dies=(1,)))


def retry_after(engine: Engine) -> float | None:
    """The error of a new request while the worker restarts."""
    with pytest.raises(Unavailable, match="restarting") as rejection:
        engine.stream(RequestSpec((1,), 5, GREEDY)).__enter__()
    return rejection.value.retry_after


def test_a_worker_that_dies_while_idle_is_restarted_at_once() -> None:
    executor = Mortal()

    async def client(engine: Engine) -> None:
        await asyncio.sleep(3)
        assert engine.is_ready
        executor.die()
        assert not engine.is_ready
        assert retry_after(engine) == 5.0
        await asyncio.sleep(9.5)
        assert not engine.is_ready
        assert retry_after(engine) == 1.0  # late, and the remaining time is not known
        await asyncio.sleep(1)
        assert engine.is_ready
        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
            assert len(await read(stream)) == 5
        executor.die()
        assert retry_after(engine) == 10.0  # as long as it took

    serve(client, executor)
    assert executor.restarts_left == 7


def test_after_too_many_restarts_an_idle_engine_reports_why_it_is_unavailable() -> None:
    executor = Mortal()
    executor.restarts_left = 1

    async def client(engine: Engine) -> None:
        for _ in range(2):
            executor.die()
            await asyncio.sleep(11)
        executor.on_lost()
        await asyncio.sleep(11)
        assert not engine.is_ready
        assert engine.failed.is_set()
        with pytest.raises(Unavailable, match="no worker: restarted too often") as rejection:
            engine.stream(RequestSpec((1,), 5, GREEDY)).__enter__()
        assert rejection.value.retry_after is None

    serve(client, executor)


def test_a_worker_that_dies_between_two_iterations_fails_no_request() -> None:
    executor = Mortal()

    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
            await asyncio.sleep(2.5)
            executor.is_dead = True  # a step is in flight and returns; then nothing more is sent
            assert len(await read(stream)) == 5
            assert now() == 15.0
            assert not stream.request.num_crashes

    serve(client, executor)


def test_every_reader_gets_the_error_if_no_worker_can_be_restarted() -> None:
    async def client(engine: Engine) -> None:
        expected = pytest.raises(Unavailable, match="no worker: restarted too often")
        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream, expected:
            await read(stream)
        assert not engine.is_ready

    executor = Mortal(dies=(0,))
    executor.restarts_left = 0
    serve(client, executor)


def test_draining_finishes_live_requests_and_rejects_new_ones() -> None:
    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,), 5, GREEDY)) as stream:
            drained = asyncio.create_task(engine.drain(100))
            assert len(await read(stream)) == 5
            with (
                pytest.raises(Unavailable, match="shutting down"),
                engine.stream(RequestSpec((1,), 5, GREEDY)),
            ):
                pytest.fail("it was accepted")
        await drained
        assert now() == 5.0

    serve(client)


def test_draining_ends_requests_with_an_error_after_its_time_limit() -> None:
    async def client(engine: Engine) -> None:
        with engine.stream(RequestSpec((1,), 50, GREEDY)) as stream:
            drained = asyncio.create_task(engine.drain(3.5))
            with pytest.raises(Unavailable, match="before the response was complete"):
                await read(stream)
        await drained
        assert now() == 3.5

    serve(client)


def test_two_steps_are_in_flight_when_the_executor_is_two_deep() -> None:
    """Four requests, two per batch: with two stages both batches advance every second."""

    async def client(engine: Engine) -> None:
        async def one(prompt: int) -> float:
            with engine.stream(RequestSpec((prompt,) * 8, 3, GREEDY)) as stream:
                await read(stream)
            return now()

        ends = await asyncio.gather(*(one(i) for i in range(2)))
        assert ends == [3.0, 3.5]

    serve(client, SimulatedExecutor(ONE_SECOND, depth=2))


def test_every_token_depends_on_its_request_and_position_only() -> None:
    def sample(entry: StepEntry) -> int:
        return 10 * entry.request_id + entry.start + len(entry.tokens)

    async def client(engine: Engine) -> None:
        async def one(delay: float, length: int) -> list[int]:
            await asyncio.sleep(delay)
            with engine.stream(RequestSpec((1,) * length, 4, GREEDY)) as stream:
                return await read(stream)

        first, second = await asyncio.gather(one(0, 1), one(0.5, 20))
        assert first == [1, 2, 3, 4]
        assert second == [30, 31, 32, 33]

    serve(client, SimulatedExecutor(ONE_SECOND, next_token=sample))
