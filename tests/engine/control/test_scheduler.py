from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.errors import ContextTooLong, Overloaded, StepFailed
from engine.iteration import Iteration
from engine.policy import build
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Abort, FinishReason, Request, RequestSpec, State
from engine.step import SamplingParams, StepResult
from tests.scheduling import HAND_COST, a_scheduler, a_spec, planned
from tests.scheduling import run_iteration as run_iteration_by_hand

GREEDY = SamplingParams(temperature=0.0)


def make(num_blocks: int = 100, block_size: int = 1, **bounds: object) -> IterationScheduler:
    values: dict[str, Any] = {"max_model_len": 1000, "max_batch_size": 4} | bounds
    return a_scheduler(FirstComeFirstServed(), num_blocks, block_size=block_size, **values)


def spec(prompt_len: int, max_tokens: int, *ends: int) -> RequestSpec:
    return RequestSpec(tuple(range(100, 100 + prompt_len)), max_tokens, GREEDY, frozenset(ends))


def commit_iteration(
    scheduler: IterationScheduler, iteration: Iteration, token: int = 5, now: float = 0.0
) -> None:
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, (token,) * samples, 0.01)
    scheduler.commit(iteration, result, now)
    scheduler.ledger.check()
    scheduler.pool.check()


def run_iteration(scheduler: IterationScheduler, token: int = 5) -> list[tuple[int, int]]:
    """One iteration: (request, tokens computed) for each entry."""
    iteration = planned(scheduler)
    commit_iteration(scheduler, iteration, token)
    return [(entry.request_id, len(entry.tokens)) for entry in iteration.step.entries]


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    scheduler = make()
    request = scheduler.add(spec(19, 3), 0.0)
    assert [run_iteration(scheduler) for _ in range(5)] == [
        [(0, 8)],
        [(0, 8)],
        [(0, 3)],
        [(0, 1)],
        [(0, 1)],
    ]
    assert request.output == [5, 5, 5]
    assert request.finish is FinishReason.LENGTH
    assert scheduler.plan(0.0) is None
    assert scheduler.ledger.num_held == 0


def test_decodes_come_before_the_chunks_of_a_prompt() -> None:
    scheduler = make()
    scheduler.add(spec(2, 9), 0.0)
    scheduler.add(spec(2, 9), 0.0)
    run_iteration(scheduler)
    scheduler.add(spec(30, 1), 0.0)
    assert run_iteration(scheduler) == [(0, 1), (1, 1), (2, 6)]


def test_an_older_prompt_leaves_a_token_for_every_younger_decode() -> None:
    scheduler = make(max_batch_tokens=4)
    scheduler.add(spec(2, 9), 0.0)
    scheduler.add(spec(20, 1), 0.0)
    scheduler.add(spec(1, 9), 0.0)
    assert run_iteration(scheduler) == [(0, 2), (1, 2)]
    assert run_iteration(scheduler) == [(0, 1), (1, 3)]


def test_an_end_token_finishes_and_frees_at_once() -> None:
    scheduler = make()
    request = scheduler.add(spec(2, 9, 5), 0.0)
    run_iteration(scheduler, token=5)
    assert request.finish is FinishReason.STOP
    assert request.output == [5]
    assert scheduler.ledger.num_held == 0


def test_end_tokens_are_banned_before_min_tokens() -> None:
    scheduler = make()
    scheduler.add(RequestSpec((1,), 9, GREEDY, frozenset({8, 5}), min_tokens=1), 0.0)
    first = planned(scheduler)
    assert first.step.entries[0].sample is not None
    assert first.step.entries[0].sample.banned == (5, 8)
    commit_iteration(scheduler, first, token=7)
    second = planned(scheduler)
    assert second.step.entries[0].sample is not None
    assert second.step.entries[0].sample.banned == ()


def test_the_first_step_carries_the_tokens_that_penalties_read_and_later_ones_do_not() -> None:
    scheduler = make()
    scheduler.add(RequestSpec((1, 2), 9, SamplingParams(repetition_penalty=1.5)), 0.0)
    found = []
    for _ in range(2):
        iteration = planned(scheduler)
        sample = iteration.step.entries[0].sample
        assert sample is not None
        found.append((sample.prompt, sample.output, sample.continues))
        commit_iteration(scheduler, iteration)
    assert found == [((1, 2), (), False), ((), (), True)]


def test_a_request_in_flight_is_not_planned_again() -> None:
    scheduler = make()
    scheduler.add(spec(2, 9), 0.0)
    assert scheduler.plan(0.0) is not None
    assert scheduler.plan(0.0) is None


def test_a_request_that_can_never_fit_is_rejected_with_both_limits() -> None:
    with pytest.raises(ContextTooLong, match=r"requested 1001 tokens \(1 in the prompt, 1000"):
        make().add(spec(1, 1000), 0.0)
    with pytest.raises(ContextTooLong, match="KV cache size is 100 tokens"):
        make().add(spec(90, 12), 0.0)
    make().add(spec(90, 11), 0.0)


def test_a_full_queue_rejects_and_estimates_retry_after() -> None:
    scheduler = make(max_queue_requests=2)
    scheduler.add(spec(10, 1), 0.0)
    scheduler.add(spec(10, 1), 0.0)
    with pytest.raises(Overloaded) as rejection:
        scheduler.add(spec(10, 1), 0.0)
    assert rejection.value.retry_after == pytest.approx(20 / scheduler.cost.tokens_per_second)
    assert len(scheduler.pool) == 2


def test_a_queue_is_bounded_by_tokens_but_accepts_one_request_of_any_size() -> None:
    scheduler = make(max_queue_tokens=10)
    scheduler.add(spec(50, 1), 0.0)
    with pytest.raises(Overloaded):
        scheduler.add(spec(1, 1), 0.0)


def test_cancelling_a_waiting_request_ends_it_at_once() -> None:
    scheduler = make()
    request = scheduler.add(spec(2, 9), 0.0)
    scheduler.cancel(request, Abort.CLIENT_GONE, 1.0)
    assert request.state is State.CANCELLED
    assert scheduler.plan(0.0) is None


def test_cancelling_between_iterations_frees_blocks_at_once() -> None:
    scheduler = make()
    request = scheduler.add(spec(2, 9), 0.0)
    run_iteration(scheduler)
    assert scheduler.ledger.num_held == 2
    scheduler.cancel(request, Abort.CLIENT_GONE, 1.0)
    assert scheduler.ledger.num_held == 0


def test_cancelling_in_flight_frees_blocks_at_the_commit_and_delivers_no_token() -> None:
    scheduler = make()
    request = scheduler.add(spec(2, 9), 0.0)
    iteration = planned(scheduler)
    scheduler.cancel(request, Abort.CLIENT_GONE, 1.0)
    scheduler.cancel(request, Abort.EXPLICIT, 1.0)
    assert (request.state, request.abort) == (State.LEAVING, Abort.CLIENT_GONE)
    assert scheduler.ledger.num_held == 2
    result = StepResult(iteration.step.step_id, (5,), 0.01)
    assert scheduler.commit(iteration, result, 0.0) == []
    assert (request.state, scheduler.ledger.num_held) == (State.CANCELLED, 0)
    assert request.output == []


def test_a_failed_iteration_fails_its_batch_and_no_other_request() -> None:
    scheduler = make(max_batch_size=1)
    lost, kept = scheduler.add(spec(2, 2), 0.0), scheduler.add(spec(2, 2), 0.0)
    iteration = planned(scheduler)
    assert scheduler.fail(iteration, StepFailed("boom"), 0.0) == [lost]
    assert (lost.state, str(lost.error)) == (State.FAILED, "boom")
    run_iteration(scheduler)
    run_iteration(scheduler)
    assert kept.state is State.FINISHED


def test_reserving_admission_never_preempts() -> None:
    scheduler = make(num_blocks=10, admission=Admission.RESERVE)
    scheduler.add(spec(2, 5), 0.0)  # six slots
    scheduler.add(spec(2, 5), 0.0)
    assert run_iteration(scheduler) == [(0, 2)]
    assert scheduler.ledger.num_held == 6


def test_growing_admission_preempts_the_youngest_when_short() -> None:
    scheduler = make(num_blocks=7)
    old, young = scheduler.add(spec(2, 6), 0.0), scheduler.add(spec(2, 6), 0.0)
    for _ in range(2):
        assert len(run_iteration(scheduler)) == 2
    assert run_iteration(scheduler) == [(0, 1)]  # four slots and three: the younger cannot grow
    assert run_iteration(scheduler) == [
        (0, 1)
    ]  # the fifth slot of the older is taken from the younger
    assert (young.state, young.setbacks.num_preemptions, young.produced) == (State.WAITING, 1, 2)
    while old.state is not State.FINISHED:
        run_iteration(scheduler)
    assert run_iteration(scheduler) == [(1, 4)]  # prompt and output, at one go
    assert young.produced == 3


def test_protected_requests_share_the_cache_and_reserve_nothing() -> None:
    """Both may need the whole cache, and need a part of it: they run together."""
    scheduler = make(num_blocks=20, max_preemptions=0)
    for _ in range(2):
        scheduler.add(spec(2, 18, 5), 0.0)
    assert run_iteration(scheduler, token=7) == [(0, 2), (1, 2)]
    assert run_iteration(scheduler, token=5) == [(0, 1), (1, 1)]
    assert not scheduler.pool


def test_a_protected_request_is_preempted_by_an_earlier_protected_one_only() -> None:
    scheduler = make(num_blocks=12, max_preemptions=0)
    early, late = scheduler.add(spec(2, 10), 0.0), scheduler.add(spec(2, 10), 0.0)
    while early.state is not State.FINISHED:
        run_iteration(scheduler)
    assert (early.setbacks.num_preemptions, late.setbacks.num_preemptions) == (0, 1)
    while scheduler.pool:
        run_iteration(scheduler)
    assert late.setbacks.num_preemptions == 1


def test_a_protected_request_grows_at_the_expense_of_more_urgent_ones() -> None:
    """Once preempted for the urgent request, the other one is protected and runs to its end."""
    scheduler = a_scheduler(
        build("priority", HAND_COST), num_blocks=14, max_batch_size=2, max_preemptions=1
    )
    patient = scheduler.add(a_spec(2, 12, priority=1), 0.0)
    for _ in range(4):
        run_iteration_by_hand(scheduler, 0.0)
    first = scheduler.add(a_spec(8, 2, priority=0), 0.0)
    while first.state is not State.FINISHED:
        run_iteration_by_hand(scheduler, 0.0)
    assert patient.setbacks.num_preemptions == 1
    run_iteration_by_hand(scheduler, 0.0)
    urgent = scheduler.add(a_spec(4, 9, priority=0), 0.0)
    while patient.state is not State.FINISHED:
        run_iteration_by_hand(scheduler, 0.0)
    assert (patient.setbacks.num_preemptions, urgent.setbacks.num_preemptions) == (1, 1)


def steps_until(scheduler: IterationScheduler, done: Callable[[], bool]) -> int:
    count = 0
    while not done():
        run_iteration(scheduler)
        count += 1
    return count


def test_a_large_request_is_stepped_over_a_bounded_number_of_times() -> None:
    scheduler = make(num_blocks=10, max_step_overs=3, admission=Admission.RESERVE)
    old = scheduler.add(spec(2, 7), 0.0)
    large = scheduler.add(spec(8, 3), 0.0)
    small = [scheduler.add(spec(1, 1), 0.0) for _ in range(9)]
    steps_until(scheduler, lambda: old.state is State.FINISHED)
    assert large.setbacks.num_step_overs == 3
    assert [request.state is State.WAITING for request in small] == [False] * 3 + [True] * 6
    steps_until(scheduler, lambda: not scheduler.pool)


def test_request_level_batching_admits_no_request_into_a_running_batch() -> None:
    scheduler = make(admission=Admission.REQUEST)
    first: list[Request] = [scheduler.add(spec(1, n), 0.0) for n in (2, 4)]
    run_iteration(scheduler)
    late = scheduler.add(spec(1, 1), 0.0)
    assert steps_until(scheduler, lambda: first[1].state is State.FINISHED) == 3
    assert late.state is State.WAITING
    assert run_iteration(scheduler) == [(2, 1)]


def test_request_level_batching_admits_a_whole_batch_beyond_the_token_budget() -> None:
    scheduler = make(admission=Admission.REQUEST, max_batch_size=3)
    requests = [scheduler.add(spec(7, 2), 0.0) for _ in range(4)]
    run_iteration(scheduler)
    assert [request.state is State.WAITING for request in requests] == [False] * 3 + [True]


def test_after_a_lost_device_requests_wait_with_the_tokens_they_have() -> None:
    scheduler = make()
    request = scheduler.add(spec(2, 9), 0.0)
    run_iteration(scheduler)
    iteration = planned(scheduler)
    assert scheduler.lose_device([iteration], 0.0) == []
    assert (request.state, request.num_computed, request.output) == (State.WAITING, 0, [5])
    assert scheduler.ledger.num_held == 0
    assert run_iteration(scheduler) == [(0, 3)]
    assert request.output == [5, 5]
    assert not request.num_crashes


def test_suspects_run_apart_and_the_one_that_crashes_workers_fails() -> None:
    scheduler = make(max_crashes=3)
    poison = scheduler.add(spec(1, 3), 0.0)
    others = [scheduler.add(spec(1, 3), 0.0) for _ in range(3)]
    crashes = 0
    while scheduler.pool:
        iteration = planned(scheduler)
        assert sum(request.num_crashes > 0 for request in iteration.requests) <= 1
        if poison in iteration.requests:
            crashes += 1
            scheduler.lose_device([iteration], 0.0)
        else:
            commit_iteration(scheduler, iteration)
    assert crashes == 3
    assert poison.state is State.FAILED
    assert [request.state for request in others] == [State.FINISHED] * 3


def test_a_suspect_with_more_crashes_runs_after_those_with_fewer() -> None:
    scheduler = make(max_crashes=9)
    early, late = scheduler.add(spec(1, 3), 0.0), scheduler.add(spec(1, 3), 0.0)
    blamed = []
    for _ in range(5):
        iteration = planned(scheduler)
        blamed.append(iteration.requests)
        scheduler.lose_device([iteration], 0.0)
    assert blamed == [(early, late), (early,), (late,), (early,), (late,)]


@pytest.mark.parametrize(("seconds", "piece"), [(inf, 63), (30.0, 58), (12.0, 22), (1.0, 16)])
def test_a_prompts_chunk_is_bounded_by_max_step_seconds_beside_decodes(
    seconds: float, piece: int
) -> None:
    """An iteration of n tokens takes (n + 1) / 2 seconds."""
    scheduler = a_scheduler(
        FirstComeFirstServed(), max_batch_size=4, max_batch_tokens=64, max_step_seconds=seconds
    )
    scheduler.add(a_spec(1, 50), 0.0)
    now = run_iteration_by_hand(scheduler, 0.0)
    for _ in range(2):
        scheduler.add(a_spec(200, 2), now)
    iteration = planned(scheduler, now)
    assert [len(entry.tokens) for entry in iteration.step.entries] == [1, piece]


def test_a_prompt_without_decodes_beside_it_runs_in_large_chunks() -> None:
    scheduler = a_scheduler(
        FirstComeFirstServed(), max_batch_size=4, max_batch_tokens=64, max_step_seconds=1.0
    )
    scheduler.add(a_spec(200, 2), 0.0)
    iteration = planned(scheduler)
    assert iteration.step.num_tokens == 64


@pytest.mark.parametrize(
    "limits", [{"max_queue_requests": 4}, {"max_queue_tokens": 16}], ids=["requests", "tokens"]
)
def test_a_client_that_fills_the_queue_does_not_keep_the_others_out(limits: dict[str, int]) -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), **limits)

    def accepted(*clients: str) -> str:
        """The clients whose request was accepted."""
        found = ""
        for client in clients:
            try:
                scheduler.add(a_spec(4, 1, client=client), 0.0)
            except Overloaded:
                continue
            found += client
        return found

    assert accepted(*"aaaaaa") == "aaaa", "it alone has the room of the settings"
    assert accepted(*"babacba") == "bbcb", "others have as much again, within equal shares"
    assert accepted(*"abcd") == "", "twice the limit is the end"
