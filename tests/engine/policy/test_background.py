"""Background requests use what the others leave, under every policy and admission mode."""

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.policy import POLICIES, Policy, build, name_of
from engine.request import Request, State
from tests.scheduling import HAND_COST, a_scheduler, a_spec, commit_iteration, play, run_iteration

JOINING = [Admission.GROW, Admission.RESERVE]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return build(request.param, HAND_COST)


def started(
    scheduler: IterationScheduler, *sizes: tuple[int, int], background: bool
) -> list[Request]:
    """Requests of (prompt, output) tokens, each of which has produced one token."""
    requests = [scheduler.add(a_spec(*size, is_background=background), now=0.0) for size in sizes]
    now = 0.0
    while not all(request.output for request in requests):
        now = run_iteration(scheduler, now)
    return requests


def test_foreground_requests_are_ordered_first(policy: Policy) -> None:
    scheduler = a_scheduler(policy)
    behind = scheduler.add(a_spec(1, 3, is_background=True, priority=-100), 0.0)
    ahead = [scheduler.add(a_spec(8, 3, priority=100), 0.0) for _ in range(3)]
    assert next(reversed(list(policy.order(0.0)))) is behind
    play(scheduler, [])
    assert behind.first_token_at is not None
    assert all(request.ended_at is not None for request in ahead)
    assert max(request.ended_at or 0.0 for request in ahead) < behind.first_token_at


def test_a_foreground_request_takes_a_background_seat_in_the_next_iteration(policy: Policy) -> None:
    scheduler = a_scheduler(policy)
    (behind,) = started(scheduler, (1, 50), background=True)
    ahead = scheduler.add(a_spec(1, 5), 10.0)
    produced, now = behind.produced, 10.0
    while not ahead.state.is_terminal:
        now = run_iteration(scheduler, now)
    assert behind.produced == produced
    assert behind.state is State.READY
    run_iteration(scheduler, now)
    assert behind.produced == produced + 1


def test_running_background_requests_take_no_tokens_from_a_prompt(policy: Policy) -> None:
    scheduler = a_scheduler(policy, max_batch_size=8)
    started(scheduler, *[(1, 50)] * 8, background=True)
    ahead = scheduler.add(a_spec(8, 5), 10.0)
    iteration = scheduler.plan(10.0)
    assert iteration is not None
    assert iteration.requests == (ahead,)
    assert iteration.step.num_tokens == 8
    commit_iteration(scheduler, iteration, 10.0)


@pytest.mark.parametrize("admission", JOINING)
def test_background_requests_are_preempted_first(policy: Policy, admission: Admission) -> None:
    scheduler = a_scheduler(policy, num_slots=40, max_batch_size=4, admission=admission)
    (behind,) = started(scheduler, (20, 15), background=True)
    ahead = scheduler.add(a_spec(8, 20), 10.0)
    run_iteration(scheduler, 10.0)
    assert ahead.state is State.READY
    assert behind.num_preemptions == (1 if admission is Admission.RESERVE else 0)
    play(scheduler, [])
    assert behind.num_preemptions == 1
    assert ahead.num_preemptions == 0
    assert (behind.produced, ahead.produced) == (15, 20)
    assert (ahead.ended_at or 0.0) < (behind.ended_at or 0.0)


def test_a_background_request_can_be_preempted_any_number_of_times(policy: Policy) -> None:
    scheduler = a_scheduler(policy, num_slots=40, max_batch_size=2, max_preemptions=1)
    (behind,) = started(scheduler, (20, 15), background=True)
    now = 10.0
    for _ in range(4):
        ahead = scheduler.add(a_spec(30, 5), now)
        while not ahead.state.is_terminal:
            now = run_iteration(scheduler, now)
        produced = behind.produced
        while behind.produced == produced:
            now = run_iteration(scheduler, now)
    assert behind.num_preemptions == 4


def test_background_requests_do_not_count_towards_the_queue_limit(policy: Policy) -> None:
    scheduler = a_scheduler(policy, max_queue_requests=2, max_queue_tokens=20)
    for _ in range(2):
        scheduler.add(a_spec(9, 1, is_background=True), 0.0)
    for _ in range(2):
        scheduler.add(a_spec(9, 1), 0.0)
    play(scheduler, [])


def test_background_requests_stay_last_when_policies_are_switched(policy: Policy) -> None:
    scheduler = a_scheduler(build("fcfs", HAND_COST))
    (behind,) = started(scheduler, (1, 5), background=True)
    ahead = scheduler.add(a_spec(1, 5), 5.0)
    scheduler.switch(policy, 5.0)
    assert list(scheduler.policy.order(5.0)) == [ahead, behind]
    play(scheduler, [])


def test_a_policy_keeps_its_name() -> None:
    assert [name_of(build(name, HAND_COST)) for name in POLICIES] == list(POLICIES)
