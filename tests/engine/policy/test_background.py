"""Background requests use what the others leave, under every policy and admission mode."""

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.policy import POLICIES, build, name_of
from engine.ports import Policy
from engine.request import Request, State
from tests.turns import HAND, a_scheduler, an_ask, answer, play, turn

JOINING = [Admission.GROW, Admission.RESERVE]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return build(request.param, HAND)


def started(
    scheduler: IterationScheduler, *sizes: tuple[int, int], background: bool
) -> list[Request]:
    """Requests of (prompt, answer) tokens that have produced a token each."""
    requests = [scheduler.add(an_ask(*size, is_background=background), now=0.0) for size in sizes]
    now = 0.0
    while not all(request.output for request in requests):
        now = turn(scheduler, now)
    return requests


def test_whoever_waits_for_an_answer_goes_first(policy: Policy) -> None:
    scheduler = a_scheduler(policy)
    behind = scheduler.add(an_ask(1, 3, is_background=True, priority=-100), 0.0)
    ahead = [scheduler.add(an_ask(8, 3, priority=100), 0.0) for _ in range(3)]
    assert next(reversed(list(policy.order(0.0)))) is behind
    play(scheduler, [])
    assert behind.first_token_at is not None
    assert all(request.ended_at is not None for request in ahead)
    assert max(request.ended_at or 0.0 for request in ahead) < behind.first_token_at


def test_a_seat_is_taken_from_the_background_within_an_iteration(policy: Policy) -> None:
    scheduler = a_scheduler(policy)
    (behind,) = started(scheduler, (1, 50), background=True)
    ahead = scheduler.add(an_ask(1, 5), 10.0)
    produced, now = behind.produced, 10.0
    while not ahead.state.is_terminal:
        now = turn(scheduler, now)
    assert behind.produced == produced
    assert behind.state is State.READY
    turn(scheduler, now)
    assert behind.produced == produced + 1


def test_background_requests_that_run_keep_no_tokens_from_a_prompt(policy: Policy) -> None:
    scheduler = a_scheduler(policy, max_batch_size=8)
    started(scheduler, *[(1, 50)] * 8, background=True)
    ahead = scheduler.add(an_ask(8, 5), 10.0)
    iteration = scheduler.plan(10.0)
    assert iteration is not None
    assert iteration.requests == (ahead,)
    assert iteration.step.num_tokens == 8
    answer(scheduler, iteration, 10.0)


@pytest.mark.parametrize("admission", JOINING)
def test_the_background_gives_up_its_memory_first(policy: Policy, admission: Admission) -> None:
    scheduler = a_scheduler(policy, num_slots=40, max_batch_size=4, admission=admission)
    (behind,) = started(scheduler, (20, 15), background=True)
    ahead = scheduler.add(an_ask(8, 20), 10.0)
    turn(scheduler, 10.0)
    assert ahead.state is State.READY
    assert behind.num_preemptions == (1 if admission is Admission.RESERVE else 0)
    play(scheduler, [])
    assert behind.num_preemptions == 1
    assert ahead.num_preemptions == 0
    assert (behind.produced, ahead.produced) == (15, 20)
    assert (ahead.ended_at or 0.0) < (behind.ended_at or 0.0)


def test_the_background_yields_however_often_it_was_preempted(policy: Policy) -> None:
    scheduler = a_scheduler(policy, num_slots=40, max_batch_size=2, max_preemptions=1)
    (behind,) = started(scheduler, (20, 15), background=True)
    now = 10.0
    for _ in range(4):
        ahead = scheduler.add(an_ask(30, 5), now)
        while not ahead.state.is_terminal:
            now = turn(scheduler, now)
        produced = behind.produced
        while behind.produced == produced:
            now = turn(scheduler, now)
    assert behind.num_preemptions == 4


def test_background_requests_do_not_fill_the_queue_for_others(policy: Policy) -> None:
    scheduler = a_scheduler(policy, max_queue_requests=2, max_queue_tokens=20)
    for _ in range(2):
        scheduler.add(an_ask(9, 1, is_background=True), 0.0)
    for _ in range(2):
        scheduler.add(an_ask(9, 1), 0.0)
    play(scheduler, [])


def test_they_stay_behind_when_policies_are_switched(policy: Policy) -> None:
    scheduler = a_scheduler(build("fcfs", HAND))
    (behind,) = started(scheduler, (1, 5), background=True)
    ahead = scheduler.add(an_ask(1, 5), 5.0)
    scheduler.switch(policy, 5.0)
    assert list(scheduler.policy.order(5.0)) == [ahead, behind]
    play(scheduler, [])


def test_a_policy_keeps_its_name() -> None:
    assert [name_of(build(name, HAND)) for name in POLICIES] == list(POLICIES)
