"""Deadlines: earliest first, the late last, the hopeless refused, with exact forecasts."""

import pytest

from engine.errors import DeadlineUnmeetable, InvalidRequest
from engine.policy import PolicySettings
from engine.policy.deadline import EarliestFeasibleFirst
from engine.request import FinishReason, Request, State
from tests.turns import HAND, a_request, a_scheduler, an_ask, ends, play, turn


def numbers(policy: EarliestFeasibleFirst, now: float) -> list[int]:
    return [request.request_id for request in policy.order(now)]


def arrive(policy: EarliestFeasibleFirst, *requests: Request) -> None:
    for request in requests:
        policy.arrive(request, request.arrived_at)


def test_who_is_due_first_goes_first() -> None:
    policy = EarliestFeasibleFirst(HAND)
    arrive(
        policy,
        a_request(0, 1, 9),
        a_request(1, 1, 9, deadline=30.0),
        a_request(2, 1, 9, ttft_deadline=20.0),
        a_request(3, 1, 9, ttft_deadline=40.0, deadline=10.0),
        a_request(4, 1, 9, deadline=90.0),
    )
    assert numbers(policy, 0.0) == [3, 2, 1, 0, 4]  # without a deadline: due after a minute


def test_the_first_token_moves_a_request_to_when_its_last_is_due() -> None:
    policy = EarliestFeasibleFirst(HAND)
    first = a_request(0, 2, 9, ttft_deadline=5.0, deadline=30.0)
    arrive(policy, first, a_request(1, 2, 9, ttft_deadline=10.0))
    assert numbers(policy, 0.0) == [0, 1]
    first.num_computed = 2
    policy.ran(first, 2, 1.5, 1.5)
    assert numbers(policy, 1.5) == [1, 0]


def test_what_can_no_longer_be_in_time_goes_last_but_not_for_ever() -> None:
    policy = EarliestFeasibleFirst(HAND)
    late = a_request(0, 7, 9, ttft_deadline=10.0)  # its prompt takes four seconds
    arrive(policy, late, a_request(1, 1, 9, ttft_deadline=20.0), a_request(2, 1, 9))
    assert numbers(policy, 6.0) == [0, 1, 2]
    assert numbers(policy, 6.5) == [1, 2, 0]
    assert numbers(policy, 6.5) == [1, 2, 0]
    arrive(policy, a_request(3, 1, 9, deadline=66.0), a_request(4, 1, 9, deadline=67.0))
    assert numbers(policy, 7.0) == [1, 2, 3, 0, 4]


def test_the_last_token_is_feasible_as_long_as_answers_of_usual_length_are() -> None:
    policy = EarliestFeasibleFirst(HAND)
    usual = a_request(0, 1, 9)
    arrive(policy, usual)
    usual.output, usual.finish = [5] * 5, FinishReason.STOP
    policy.leave(usual, 0.0)
    arrive(policy, a_request(1, 1, 9, deadline=20.0), a_request(2, 1, 9, deadline=30.0))
    assert numbers(policy, 15.0) == [1, 2]  # five tokens, a second each
    assert numbers(policy, 15.5) == [2, 1]


def test_what_takes_too_long_even_alone_is_refused_for_good() -> None:
    policy = EarliestFeasibleFirst(HAND)
    ask = an_ask(9, 9, ttft_deadline=4.5)
    with pytest.raises(InvalidRequest, match=r"ttft_deadline is 4.5 s.*takes about 5 s") as refusal:
        policy.validate(ask, 9, 0.0)
    assert refusal.value.param == "ttft_deadline"
    policy.validate(ask, 8, 0.0)  # one token is cached
    policy.validate(an_ask(400, 9), 400, 0.0)


def test_what_the_queue_makes_late_is_refused_until_later() -> None:
    policy = EarliestFeasibleFirst(HAND)
    arrive(policy, a_request(0, 9, 9, deadline=10.0), a_request(1, 99, 9, deadline=60.0))
    # Four seconds for the eight tokens that the first takes more than one would, two for its own.
    with pytest.raises(DeadlineUnmeetable, match="about 6 s") as refusal:
        policy.validate(an_ask(3, 9, deadline=12.0, ttft_deadline=5.5), 3, 5.0)
    assert refusal.value.retry_after == 0.5
    policy.validate(an_ask(3, 9, deadline=12.0, ttft_deadline=6.0), 3, 5.0)
    policy.validate(an_ask(3, 9, ttft_deadline=4.5), 3, 5.0)  # due before the others


def test_a_queue_for_seats_counts() -> None:
    policy = EarliestFeasibleFirst(HAND, PolicySettings(seats=2))
    for number in range(4):
        arrive(policy, a_request(number, 1, 9, min_tokens=6, deadline=9.0))
    # Three answers of six seconds leave two seats before it has one.
    with pytest.raises(DeadlineUnmeetable, match="about 10 s"):
        policy.validate(an_ask(1, 9, ttft_deadline=9.5), 1, 0.5)
    policy.validate(an_ask(1, 9, ttft_deadline=10.0), 1, 0.5)


def test_the_pace_under_load_is_forgotten_when_nobody_is_left() -> None:
    policy = EarliestFeasibleFirst(HAND)
    slow = a_request(0, 1, 9)
    arrive(policy, slow)
    policy.ran(slow, 1, 50.0, 50.0)
    ask = an_ask(1, 9, min_tokens=3, deadline=10.0)
    with pytest.raises(DeadlineUnmeetable, match="about 101 s"):
        policy.validate(ask, 1, 50.0)
    policy.leave(slow, 50.0)
    policy.validate(ask, 1, 50.0)


def test_a_refused_request_was_never_there() -> None:
    scheduler = a_scheduler(EarliestFeasibleFirst(HAND))
    scheduler.add(an_ask(9, 9, deadline=30.0), 0.0)
    with pytest.raises(DeadlineUnmeetable):
        scheduler.add(an_ask(3, 9, ttft_deadline=3.0, deadline=40.0), 28.0)
    assert len(scheduler.pool) == 1
    assert len(list(scheduler.policy.order(0.0))) == 1


def test_the_urgent_meet_their_deadlines_where_first_come_first_served_would_not() -> None:
    arrivals = [(0.0, an_ask(1, 6)), (0.5, an_ask(1, 3, deadline=9.0)), (0.75, an_ask(1, 1))]
    patient, urgent, last = play(a_scheduler(EarliestFeasibleFirst(HAND)), arrivals)
    assert ends([urgent, patient, last]) == [4.0, 9.0, 10.0]


def test_a_deadline_that_passes_ends_the_request_and_frees_its_memory() -> None:
    scheduler = a_scheduler(EarliestFeasibleFirst(HAND))
    request = scheduler.add(an_ask(1, 9, deadline=3.5), 0.0)
    now = 0.0
    while scheduler.pool:
        now = turn(scheduler, now)
    assert (request.state, request.produced, now) == (State.EXPIRED, 4, 4.0)
    assert scheduler.ledger.num_held == 0
