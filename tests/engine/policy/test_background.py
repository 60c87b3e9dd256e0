from dataclasses import replace

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.policy import POLICIES, Policy, build, name_of
from engine.request import Request, State
from tests.scheduling import (
    HAND_COST,
    a_scheduler,
    a_spec,
    commit_iteration,
    planned,
    play,
    run_iteration,
)

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
    assert behind.times.first_token_at is not None
    assert all(request.times.ended_at is not None for request in ahead)
    assert max(request.times.ended_at or 0.0 for request in ahead) < behind.times.first_token_at


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
    iteration = planned(scheduler, 10.0)
    assert iteration.requests == (ahead,)
    assert iteration.step.num_tokens == 8
    commit_iteration(scheduler, iteration, 10.0)


@pytest.mark.parametrize("admission", JOINING)
def test_background_requests_are_preempted_first(policy: Policy, admission: Admission) -> None:
    scheduler = a_scheduler(policy, num_blocks=40, max_batch_size=4, admission=admission)
    (behind,) = started(scheduler, (20, 15), background=True)
    ahead = scheduler.add(a_spec(8, 20), 10.0)
    run_iteration(scheduler, 10.0)
    assert ahead.state is State.READY
    assert behind.setbacks.num_preemptions == (1 if admission is Admission.RESERVE else 0)
    play(scheduler, [])
    assert behind.setbacks.num_preemptions == 1
    assert ahead.setbacks.num_preemptions == 0
    assert (behind.produced, ahead.produced) == (15, 20)
    assert (ahead.times.ended_at or 0.0) < (behind.times.ended_at or 0.0)


def test_a_background_request_can_be_preempted_any_number_of_times(policy: Policy) -> None:
    scheduler = a_scheduler(policy, num_blocks=40, max_batch_size=2, max_preemptions=1)
    (behind,) = started(scheduler, (20, 15), background=True)
    now = 10.0
    for _ in range(4):
        ahead = scheduler.add(a_spec(30, 5), now)
        while not ahead.state.is_terminal:
            now = run_iteration(scheduler, now)
        produced = behind.produced
        while behind.produced == produced:
            now = run_iteration(scheduler, now)
    assert behind.setbacks.num_preemptions == 4


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


def check_slowdown(
    scheduler: IterationScheduler, num_iterations: int, others: list[Request]
) -> None:
    """Check that each iteration takes at most 1.5 times what it takes without background rows."""
    now = 10.0
    for _ in range(num_iterations):
        iteration = planned(scheduler, now)
        rows = zip(iteration.requests, iteration.step.entries, strict=True)
        own = [entry for request, entry in rows if not request.spec.is_background]
        assert len(own) == len(others), "no other request waits"
        alone = replace(iteration.step, entries=tuple(own))
        assert HAND_COST.step(iteration.step) <= 1.5 * HAND_COST.step(alone)
        now = commit_iteration(scheduler, iteration, now)


def test_background_requests_slow_an_iteration_down_by_a_bounded_factor(policy: Policy) -> None:
    """Eight decodes take 4.5 s, which leaves 2.25 s: four background tokens of 0.5 s each."""
    scheduler = a_scheduler(
        policy,
        num_blocks=5000,
        max_batch_size=40,
        max_batch_tokens=200,
        max_background_slowdown=1.5,
    )
    others = started(scheduler, *[(1, 60)] * 8, background=False)
    decodes = [scheduler.add(a_spec(1, 40, is_background=True), 5.0) for _ in range(10)]
    prompt = scheduler.add(a_spec(400, 5, is_background=True), 5.0)
    check_slowdown(scheduler, 30, others)
    assert sum(request.produced for request in decodes) == 30 * 4
    assert prompt.num_computed == 0, "a chunk of 16 tokens takes 8 s"
    play(scheduler, [])
    assert prompt.produced == 5
    assert all(request.produced == 40 for request in decodes)


def test_a_background_prompt_gets_chunks_that_fit(policy: Policy) -> None:
    """Sixty decodes take 30.5 s, which leaves time for 30 tokens of a prompt."""
    scheduler = a_scheduler(
        policy,
        num_blocks=5000,
        max_batch_size=80,
        max_batch_tokens=500,
        max_background_slowdown=1.5,
    )
    others = started(scheduler, *[(1, 60)] * 60, background=False)
    prompt = scheduler.add(a_spec(400, 5, is_background=True), 5.0)
    check_slowdown(scheduler, 10, others)
    assert prompt.num_computed == 300
    play(scheduler, [])


def test_without_others_background_requests_use_whole_iterations(policy: Policy) -> None:
    scheduler = a_scheduler(
        policy,
        num_blocks=5000,
        max_batch_size=40,
        max_batch_tokens=200,
        max_background_slowdown=1.0,
    )
    prompt = scheduler.add(a_spec(400, 5, is_background=True), 0.0)
    run_iteration(scheduler, 0.0)
    assert prompt.num_computed == 200
    other = scheduler.add(a_spec(1, 5), 1.0)
    while not other.state.is_terminal:
        run_iteration(scheduler, 1.0)
        assert prompt.num_computed == 200
    play(scheduler, [])
    assert prompt.produced == 5
