import pytest

from engine.errors import DeadlineUnmeetable, InvalidRequest
from engine.policy import PolicySettings
from engine.policy.deadline import EarliestFeasibleFirst
from engine.policy.waiting import MAX_AT_ONCE
from engine.request import FinishReason, Request, State
from tests.scheduling import (
    HAND_COST,
    CountingCost,
    a_request,
    a_scheduler,
    a_spec,
    ends,
    play,
    run_iteration,
)


def numbers(policy: EarliestFeasibleFirst, now: float) -> list[int]:
    return [request.request_id for request in policy.order(now)]


def arrive(policy: EarliestFeasibleFirst, *requests: Request) -> None:
    for request in requests:
        policy.arrive(request, request.times.arrived_at)


def test_the_request_due_first_is_ordered_first() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    arrive(
        policy,
        a_request(0, 1, 9),
        a_request(1, 1, 9, deadline=30.0),
        a_request(2, 1, 9, ttft_deadline=20.0),
        a_request(3, 1, 9, ttft_deadline=40.0, deadline=10.0),
        a_request(4, 1, 9, deadline=90.0),
    )
    assert numbers(policy, 0.0) == [3, 2, 1, 0, 4]  # without a deadline: due after a minute


def test_after_its_first_token_a_request_is_due_at_its_end() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    first = a_request(0, 2, 9, ttft_deadline=5.0, deadline=30.0)
    arrive(policy, first, a_request(1, 2, 9, ttft_deadline=10.0))
    assert numbers(policy, 0.0) == [0, 1]
    first.num_computed = 2
    policy.ran(first, 2, 1.5, 1.5)
    assert numbers(policy, 1.5) == [1, 0]


def test_a_request_that_misses_its_deadline_is_ordered_last_but_does_not_starve() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    late = a_request(0, 7, 9, ttft_deadline=10.0)  # its prompt takes four seconds
    arrive(policy, late, a_request(1, 1, 9, ttft_deadline=20.0), a_request(2, 1, 9))
    assert numbers(policy, 6.0) == [0, 1, 2]
    assert numbers(policy, 6.5) == [1, 2, 0]
    assert numbers(policy, 6.5) == [1, 2, 0]
    arrive(policy, a_request(3, 1, 9, deadline=66.0), a_request(4, 1, 9, deadline=67.0))
    assert numbers(policy, 7.0) == [1, 2, 3, 0, 4]


def test_a_deadline_is_feasible_if_an_output_of_usual_length_meets_it() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    usual = a_request(0, 1, 9)
    arrive(policy, usual)
    usual.output, usual.finish = [5] * 5, FinishReason.STOP
    policy.leave(usual, 0.0)
    arrive(policy, a_request(1, 1, 9, deadline=20.0), a_request(2, 1, 9, deadline=30.0))
    assert numbers(policy, 15.0) == [1, 2]  # five tokens, a second each
    assert numbers(policy, 15.5) == [2, 1]


def test_a_deadline_missed_even_alone_is_an_invalid_request() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    spec = a_spec(9, 9, ttft_deadline=4.5)
    with pytest.raises(
        InvalidRequest, match=r"ttft_deadline is 4.5 s.*takes about 5 s"
    ) as rejection:
        policy.validate(spec, 9, 0.0)
    assert rejection.value.param == "ttft_deadline"
    policy.validate(spec, 8, 0.0)  # one token is cached
    policy.validate(a_spec(400, 9), 400, 0.0)


def test_a_deadline_missed_because_of_the_queue_is_rejected_with_retry_after() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    arrive(policy, a_request(0, 9, 9, deadline=10.0), a_request(1, 99, 9, deadline=60.0))
    # Four seconds for the eight tokens that the first takes more than one would, two for its own.
    with pytest.raises(DeadlineUnmeetable, match="about 6 s") as rejection:
        policy.validate(a_spec(3, 9, deadline=12.0, ttft_deadline=5.5), 3, 5.0)
    assert rejection.value.retry_after == 0.5
    policy.validate(a_spec(3, 9, deadline=12.0, ttft_deadline=6.0), 3, 5.0)
    policy.validate(a_spec(3, 9, ttft_deadline=4.5), 3, 5.0)  # due before the others


def test_the_forecast_counts_the_queue_for_seats() -> None:
    policy = EarliestFeasibleFirst(HAND_COST, PolicySettings(seats=2))
    for number in range(4):
        arrive(policy, a_request(number, 1, 9, min_tokens=6, deadline=9.0))
    # Three answers of six seconds leave two seats before it has one.
    with pytest.raises(DeadlineUnmeetable, match="about 10 s"):
        policy.validate(a_spec(1, 9, ttft_deadline=9.5), 1, 0.5)
    policy.validate(a_spec(1, 9, ttft_deadline=10.0), 1, 0.5)


def test_the_pace_under_load_is_forgotten_when_no_request_is_left() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    slow = a_request(0, 1, 9)
    arrive(policy, slow)
    policy.ran(slow, 1, 50.0, 50.0)
    spec = a_spec(1, 9, min_tokens=3, deadline=10.0)
    with pytest.raises(DeadlineUnmeetable, match="about 101 s"):
        policy.validate(spec, 1, 50.0)
    policy.leave(slow, 50.0)
    policy.validate(spec, 1, 50.0)


def test_a_rejected_request_leaves_no_trace() -> None:
    scheduler = a_scheduler(EarliestFeasibleFirst(HAND_COST))
    scheduler.add(a_spec(30, 9, deadline=30.0), 0.0)
    with pytest.raises(DeadlineUnmeetable):
        scheduler.add(a_spec(4, 9, ttft_deadline=16.5), 14.0)
    assert len(scheduler.pool) == 1
    assert len(list(scheduler.policy.order(0.0))) == 1


def test_urgent_requests_meet_deadlines_that_fcfs_misses() -> None:
    arrivals = [(0.0, a_spec(1, 6)), (0.5, a_spec(1, 3, deadline=9.0)), (0.75, a_spec(1, 1))]
    patient, urgent, last = play(a_scheduler(EarliestFeasibleFirst(HAND_COST)), arrivals)
    assert ends([urgent, patient, last]) == [4.0, 9.0, 10.0]


def test_a_deadline_that_passes_ends_the_request_and_frees_its_blocks() -> None:
    scheduler = a_scheduler(EarliestFeasibleFirst(HAND_COST))
    request = scheduler.add(a_spec(1, 9, deadline=3.5), 0.0)
    now = 0.0
    while scheduler.pool:
        now = run_iteration(scheduler, now)
    assert (request.state, request.produced, now) == (State.EXPIRED, 4, 4.0)
    assert scheduler.ledger.num_held == 0


def test_validating_a_deadline_predicts_a_bounded_number_of_costs() -> None:
    cost = CountingCost()
    policy = EarliestFeasibleFirst(cost, PolicySettings(seats=64))
    for number in range(5000):
        arrive(policy, a_request(number, 9, 9, deadline=1e6))
    cost.num_calls = 0
    policy.validate(a_spec(9, 9, deadline=2e6), 9, 0.0)
    assert 64 < cost.num_calls < 64 * 8


def test_a_sampled_queue_has_the_same_forecast_as_a_whole_one() -> None:
    """All requests are alike, so a part of them stands for all exactly."""
    policy = EarliestFeasibleFirst(HAND_COST, PolicySettings(seats=4))
    for number in range(500):
        arrive(policy, a_request(number, 9, 9, deadline=1000.0))
    with pytest.raises(DeadlineUnmeetable, match=r"about 2\.13e\+03 s"):
        policy.validate(a_spec(9, 9, ttft_deadline=2000.0, deadline=2e6), 9, 0.0)


def test_one_walk_postpones_a_bounded_number_of_late_requests() -> None:
    policy = EarliestFeasibleFirst(HAND_COST)
    for number in range(1000):
        arrive(policy, a_request(number, 9, 9, deadline=5.0))
    next(policy.order(100.0))
    late = [r for r in policy.order(0.0) if policy.sort_keys([r], 0.0)[0][0] > 100.0]
    assert 0 < len(late) <= MAX_AT_ONCE


def test_a_request_that_is_late_for_a_far_deadline_is_not_left_out_of_the_order() -> None:
    """It is due later than a request that starves, so that it keeps its place."""
    policy = EarliestFeasibleFirst(HAND_COST, PolicySettings(starvation_seconds=4.0))
    arrive(policy, a_request(0, 30, 9, deadline=15.0), a_request(1, 1, 9))
    assert numbers(policy, 1.0) == [1, 0]
