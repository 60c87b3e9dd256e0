import asyncio

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import DeadlineExceeded, StepFailed
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.policy.mlfq import SkipJoinMLFQ
from engine.request import Abort, FinishReason, State
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from tests.scheduling import (
    HAND_COST,
    a_scheduler,
    a_spec,
    commit_iteration,
    planned,
    run_iteration,
)


def test_a_waiting_request_expires_at_once() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_spec(2, 9, deadline=5.0), 1.0)
    assert scheduler.expire(5.75) == []
    assert scheduler.expire(6.0) == [request]
    assert (request.state, request.outcome) == (State.EXPIRED, "expired")
    assert str(request.error) == "The request's deadline of 5 s passed after 0 output tokens."
    assert scheduler.expire(7.0) == []
    assert not list(scheduler.policy.order(7.0))


def test_a_request_between_iterations_expires_at_once() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_spec(2, 9, deadline=5.0), 0.0)
    run_iteration(scheduler, 0.0)
    assert scheduler.expire(5.0) == [request]
    assert (request.state, scheduler.ledger.num_held) == (State.EXPIRED, 0)


def test_a_request_in_flight_expires_when_its_iteration_returns() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_spec(2, 9, deadline=1.0), 0.0)
    iteration = planned(scheduler)
    assert scheduler.expire(1.0) == [request]
    assert (request.state, scheduler.ledger.num_held) == (State.LEAVING, 2)
    commit_iteration(scheduler, iteration, 0.0)
    assert (request.state, scheduler.ledger.num_held) == (State.EXPIRED, 0)
    assert request.output == []


@pytest.mark.parametrize("ending", ["failed", "lost"])
def test_a_request_in_flight_expires_even_if_its_iteration_does_not_return(ending: str) -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_spec(2, 9, deadline=1.0), 0.0)
    iteration = planned(scheduler)
    scheduler.expire(1.0)
    if ending == "failed":
        scheduler.fail(iteration, StepFailed("boom"), 1.5)
    else:
        scheduler.lose_device([iteration], 1.5)
    assert request.state is State.EXPIRED
    assert isinstance(request.error, DeadlineExceeded)


def test_a_request_cancelled_in_flight_before_its_deadline_does_not_expire() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_spec(2, 9, deadline=1.0), 0.0)
    iteration = planned(scheduler)
    scheduler.cancel(request, Abort.CLIENT_GONE, 0.5)
    assert scheduler.expire(1.0) == []
    commit_iteration(scheduler, iteration, 0.0)
    assert (request.state, request.error) == (State.CANCELLED, None)


def test_a_request_that_finished_in_time_does_not_expire() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_spec(1, 1, deadline=1.0), 0.0)
    run_iteration(scheduler, 0.0)
    assert scheduler.expire(2.0) == []
    assert request.state is State.FINISHED


def test_a_reader_gets_the_produced_tokens_and_then_the_error_while_other_requests_continue() -> (
    None
):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        settings = SchedulerSettings(max_model_len=50, max_batch_size=4, max_batch_tokens=8)
        scheduler = IterationScheduler(settings, KVLedger(KVShape(50, 1)), FirstComeFirstServed())
        engine = Engine(scheduler, SimulatedExecutor(HAND_COST), loop.time)
        running = loop.create_task(engine.run())
        with (
            engine.stream(a_spec(1, 9, deadline=4.0)) as late,
            engine.stream(a_spec(1, 6)) as other,
        ):
            await asyncio.sleep(2.0)
            engine.switch(SkipJoinMLFQ(HAND_COST))
            await asyncio.sleep(3.0)
            # An iteration of two tokens takes a second and a half.
            assert len((await late.next()).tokens) == 2
            with pytest.raises(DeadlineExceeded, match="deadline of 4 s passed after 2"):
                await late.next()
            finish: FinishReason | None = None
            while finish is None:
                finish = (await other.next()).finish
            assert other.request.produced == 6
        running.cancel()

    run_virtual(main())


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    kept = scheduler.add(a_spec(2, 9, deadline=5000.0), 0.0)
    for _ in range(1000):
        request = scheduler.add(a_spec(2, 9, deadline=86400.0), 0.0)
        scheduler.cancel(request, Abort.CLIENT_GONE, 0.0)
    assert len(scheduler.pool._deadlines) <= 100
    assert scheduler.pool.next_deadline == 5000.0
    assert scheduler.expire(5000.0) == [kept]
