from itertools import chain

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.errors import ContextTooLong, RowFailed
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy import build
from engine.policy.fcfs import FirstComeFirstServed
from engine.pooling import PoolSpec
from engine.request import Abort, FinishReason, RequestSpec, State
from engine.step import Fault, StepResult
from tests.scheduling import (
    GREEDY,
    HAND_COST,
    a_scheduler,
    a_spec,
    commit_iteration,
    planned,
    play,
    run_iteration,
)


def a_pooling_spec(prompt_len: int, **fields: object) -> RequestSpec:
    """A request that pools a prompt of this length."""
    return RequestSpec((1,) * prompt_len, 0, GREEDY, pooling=PoolSpec(), **fields)  # type: ignore[arg-type]


def test_a_prompt_is_computed_in_chunks_and_pooled_with_the_last_one() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_pooling_spec(10), 0.0)
    first = planned(scheduler)
    assert [(len(e.tokens), e.sample, e.pooling) for e in first.step.entries] == [(8, None, None)]
    assert scheduler.commit(first, StepResult(first.step.step_id, (), 1.0), 1.0) == []
    last = planned(scheduler, 1.0)
    assert [(len(e.tokens), e.pooling) for e in last.step.entries] == [(2, PoolSpec())]
    result = StepResult(last.step.step_id, (), 1.0, vectors=(b"1234",))
    (delivery,) = scheduler.commit(last, result, 2.0)
    assert (delivery.request, delivery.token) == (request, None)
    assert (request.state, request.finish) == (State.FINISHED, FinishReason.STOP)
    assert (request.vector, request.output, request.times.first_token_at) == (b"1234", [], None)
    scheduler.ledger.check()
    assert scheduler.ledger.num_held == 0


@pytest.mark.parametrize("admission", list(Admission))
def test_pooling_requests_and_generations_share_iterations(admission: Admission) -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=4, admission=admission)
    arrivals = [(0.0, a_spec(3, 4)), (0.0, a_pooling_spec(3)), (1.0, a_pooling_spec(5))]
    generated, *pooled = play(scheduler, arrivals)
    assert len(generated.output) == 4
    assert all(request.vector == b"vector" for request in pooled)
    assert pooled[0].times.ended_at is not None
    assert generated.times.ended_at is not None
    assert pooled[0].times.ended_at < generated.times.ended_at
    assert scheduler.ledger.num_held == 0


def test_a_fault_fails_the_request_without_a_vector() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=2)
    requests = [scheduler.add(a_pooling_spec(3), 0.0) for _ in range(2)]
    iteration = planned(scheduler)
    result = StepResult(
        iteration.step.step_id, (), 1.0, faults=(Fault(0, "NaN"),), vectors=(b"nan!", b"good")
    )
    scheduler.commit(iteration, result, 1.0)
    assert [request.state for request in requests] == [State.FAILED, State.FINISHED]
    assert isinstance(requests[0].error, RowFailed)
    assert [request.vector for request in requests] == [b"", b"good"]


def test_the_vector_of_a_request_cancelled_in_flight_is_dropped() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_pooling_spec(3), 0.0)
    iteration = planned(scheduler)
    scheduler.cancel(request, Abort.CLIENT_GONE, 0.5)
    result = StepResult(iteration.step.step_id, (), 1.0, vectors=(b"1234",))
    assert scheduler.commit(iteration, result, 1.0) == []
    assert (request.state, request.vector) == (State.CANCELLED, b"")
    assert scheduler.ledger.num_held == 0


def test_a_lost_worker_computes_the_prompt_again() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    request = scheduler.add(a_pooling_spec(3), 0.0)
    iteration = planned(scheduler)
    scheduler.lose_device([iteration], 1.0)
    assert request.state is State.WAITING
    run_iteration(scheduler, 1.0)
    assert request.vector == b"vector"


def test_no_iteration_is_planned_ahead_of_a_vector() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    scheduler.add(a_pooling_spec(3), 0.0)
    iteration = planned(scheduler)
    assert scheduler.plan(0.0, iteration) is None


def test_a_prompt_may_fill_the_context() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_model_len=10, num_blocks=10)
    scheduler.arrivals.check_fits(10, 0)
    with pytest.raises(ContextTooLong, match="is 10 tokens, but the input has 11"):
        scheduler.arrivals.check_fits(11, 0)


def an_encoders_scheduler(**bounds: object) -> IterationScheduler:
    """A scheduler of a model that keeps no KV, with at most 8 tokens per iteration."""
    values = {"max_model_len": 8, "max_batch_size": 4, "max_batch_tokens": 8}
    settings = SchedulerSettings(**(values | bounds), chunks_prompts=False)  # type: ignore[arg-type]
    ledger = KVLedger(KVShape(1, 1, windows=()))
    return IterationScheduler(settings, ledger, build("fcfs", HAND_COST), cost=LiveCost(HAND_COST))


@pytest.mark.parametrize("admission", list(Admission))
def test_whole_prompts_share_an_iteration_as_far_as_they_fit_and_hold_no_blocks(
    admission: Admission,
) -> None:
    scheduler = an_encoders_scheduler(admission=admission)
    for length in (3, 4, 5, 2, 8, 1):
        scheduler.add(a_pooling_spec(length), 0.0)
    lengths = []
    while scheduler.pool:
        iteration = planned(scheduler)
        assert scheduler.ledger.num_held == 0
        assert all(entry.pooling is not None for entry in iteration.step.entries)
        lengths.append([len(entry.tokens) for entry in iteration.step.entries])
        commit_iteration(scheduler, iteration, 0.0)
    if admission is not Admission.REQUEST:
        assert lengths == [[3, 4], [5, 2], [8], [1]]
    assert sorted(chain.from_iterable(lengths)) == [1, 2, 3, 4, 5, 8]


def test_a_whole_prompt_of_a_lost_worker_is_computed_again() -> None:
    scheduler = an_encoders_scheduler()
    requests = [scheduler.add(a_pooling_spec(4), 0.0) for _ in range(2)]
    iteration = planned(scheduler)
    scheduler.lose_device([iteration], 1.0)
    for _ in range(2):  # suspects run one at a time
        run_iteration(scheduler, 1.0)
    assert [request.vector for request in requests] == [b"vector"] * 2


def test_whole_background_prompts_wait_for_time() -> None:
    scheduler = an_encoders_scheduler(max_background_slowdown=1.1)
    background = scheduler.add(a_pooling_spec(4, is_background=True), 0.0)
    scheduler.add(a_pooling_spec(3), 0.0)
    first = planned(scheduler)
    assert background not in first.requests
    commit_iteration(scheduler, first, 0.0)
    run_iteration(scheduler, 1.0)
    assert background.vector == b"vector"
