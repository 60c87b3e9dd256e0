"""Skip-join MLFQ with exact costs: levels, times, starvation, preemption."""

import pytest

from engine.control.admission import SwapMode
from engine.cost.model import CostModel
from engine.policy import PolicySettings
from engine.policy.fcfs import FirstComeFirstServed
from engine.policy.mlfq import SkipJoinMLFQ
from engine.request import Request, State
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


def compute(policy: SkipJoinMLFQ, request: Request, num_tokens: int, now: float = 0.0) -> int:
    """Report an iteration of this request alone to the policy; the request's level afterwards."""
    seconds = HAND_COST.compute(num_tokens, request.num_computed)
    request.num_computed += num_tokens
    policy.ran(request, num_tokens, seconds, now)
    if not request.remaining:
        request.output.append(5)
    return policy.level(request)


@pytest.mark.parametrize(("prompt_len", "level"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_a_request_joins_the_highest_queue_whose_quantum_covers_its_first_iteration(
    prompt_len: int, level: int
) -> None:
    policy = SkipJoinMLFQ(HAND_COST)
    request = a_request(0, prompt_len, 9)
    policy.arrive(request, 0.0)
    assert policy.level(request) == level


def test_a_request_that_no_quantum_covers_joins_the_lowest_queue() -> None:
    policy = SkipJoinMLFQ(HAND_COST, PolicySettings(num_levels=3))
    request = a_request(0, 400, 9)
    policy.arrive(request, 0.0)
    assert policy.level(request) == 2
    assert compute(policy, request, 400) == 2


def test_level_sizes_count_the_requests_of_each_queue() -> None:
    policy = SkipJoinMLFQ(HAND_COST, PolicySettings(num_levels=3))
    for number, prompt_len in enumerate((1, 1, 3, 400)):
        policy.arrive(a_request(number, prompt_len, 9), 0.0)
    assert policy.level_sizes == [2, 1, 1]


def test_without_skips_every_request_joins_the_highest_queue() -> None:
    policy = SkipJoinMLFQ(HAND_COST, PolicySettings(skips=False))
    request = a_request(0, 15, 9)
    policy.arrive(request, 0.0)
    assert policy.level(request) == 0
    # Two seconds of one are used, and the twelve tokens that are left take six and a half.
    assert compute(policy, request, 3) == 3


def test_a_quantum_lasts_twice_as_long_in_each_next_queue() -> None:
    policy = SkipJoinMLFQ(HAND_COST)
    request = a_request(0, 1, 99)
    policy.arrive(request, 0.0)
    levels = [compute(policy, request, 1) for _ in range(15)]
    assert levels == [1] + [1, 2] + [2, 2, 2, 3] + [3] * 7 + [4]


def test_the_base_quantum_is_the_shortest_iteration_unless_given() -> None:
    cost = CostModel.linear(per_step=0.25, per_token=0.25, per_slot=0.0)
    policy = SkipJoinMLFQ(cost, PolicySettings(base_quantum=8.0))
    request = a_request(0, 30, 9)
    policy.arrive(request, 0.0)
    assert policy.level(request) == 0


def test_short_outputs_overtake_a_long_one_that_arrived_first() -> None:
    arrivals = [(0.0, a_spec(1, 10)), (2.5, a_spec(1, 2))]
    long, short = play(a_scheduler(SkipJoinMLFQ(HAND_COST)), arrivals)
    assert ends([long, short]) == [12.0, 5.0]
    assert long.setbacks.num_preemptions == 0  # it kept its KV while the other ran
    assert ends(play(a_scheduler(FirstComeFirstServed()), arrivals)) == [10.0, 12.0]


def test_requests_that_arrive_before_a_long_prompt_starts_overtake_it() -> None:
    arrivals = [(0.0, a_spec(1, 1)), (0.25, a_spec(7, 1)), (0.5, a_spec(1, 3))]
    assert ends(play(a_scheduler(SkipJoinMLFQ(HAND_COST)), arrivals)) == [1.0, 8.0, 4.0]


def test_starving_requests_are_promoted_with_enough_quantum_for_their_next_iteration() -> None:
    policy = SkipJoinMLFQ(HAND_COST, PolicySettings(starvation_seconds=3.0))
    request, young = a_request(0, 7, 9), a_request(1, 1, 9)
    policy.arrive(request, 0.0)
    policy.arrive(young, 0.0)
    compute(policy, young, 1, now=2.9)
    assert list(policy.order(2.9)) == [young, request]
    assert list(policy.order(3.0)) == [request, young]
    assert policy.level(request) == 0
    # The prompt as a whole takes four seconds, which is its quantum, whatever its chunks take.
    assert [compute(policy, request, 1, now=3.0) for _ in range(7)] == [0] * 6 + [1]


def test_a_starving_request_runs_at_the_limit_under_endless_arrivals() -> None:
    flood = [(float(second), a_spec(1, 1)) for second in range(40)]
    arrivals = sorted([*flood, (0.0, a_spec(7, 1))], key=lambda arrival: arrival[0])
    scheduler = a_scheduler(SkipJoinMLFQ(HAND_COST, PolicySettings(starvation_seconds=10.0)))
    (starved,) = (r for r in play(scheduler, arrivals) if r.prompt_len == 7)
    # Promoted at 10, behind the one that arrived at that moment; then four seconds of prompt.
    assert starved.times.last_token_at == 15.0


def test_a_request_in_flight_does_not_starve() -> None:
    policy = SkipJoinMLFQ(HAND_COST, PolicySettings(starvation_seconds=3.0))
    request = a_request(0, 7, 9)
    policy.arrive(request, 0.0)
    request.state = State.RUNNING
    list(policy.order(5.0))
    assert policy.level(request) == 2


@pytest.mark.parametrize(
    ("num_host_slots", "short_state", "long_state"),
    [
        (12, State.FINISHED, State.SWAPPED),
        (6, State.WAITING, State.READY),
        (0, State.WAITING, State.READY),
    ],
)
def test_a_new_request_preempts_a_demoted_one_if_the_host_tier_can_keep_its_kv(
    num_host_slots: int, short_state: State, long_state: State
) -> None:
    scheduler = a_scheduler(
        SkipJoinMLFQ(HAND_COST),
        num_blocks=12,
        num_host_blocks=num_host_slots,
        swap=SwapMode.REACTIVE,
    )
    long = scheduler.add(a_spec(4, 8), 0.0)
    now = 0.0
    while long.produced < 4:
        now = run_iteration(scheduler, now)
    short = scheduler.add(a_spec(6, 1), now)  # in a higher queue, and wants six slots
    now = run_iteration(scheduler, now)
    assert (short.state, long.state) == (short_state, long_state)
    while scheduler.pool:
        now = run_iteration(scheduler, now)
    assert (long.setbacks.num_preemptions, short.setbacks.num_preemptions) == (0, 0)


def test_a_request_is_charged_its_own_cost_and_not_the_shared_iteration() -> None:
    """Iterations with others take ten times as long; the levels are those of a lone request."""
    policy = SkipJoinMLFQ(HAND_COST)
    request = a_request(0, 1, 99)
    policy.arrive(request, 0.0)
    levels = []
    for now in range(4):
        request.num_computed += 1
        policy.ran(request, 1, 10.0, float(now))
        request.output.append(5)
        levels.append(policy.level(request))
    assert levels == [1, 1, 2, 2]


@pytest.mark.parametrize("chunk", [1, 3, 7, 15])
def test_a_chunked_prompt_is_not_demoted_before_its_first_token(chunk: int) -> None:
    policy = SkipJoinMLFQ(HAND_COST)
    request = a_request(0, 15, 9)
    policy.arrive(request, 0.0)
    while request.remaining > chunk:
        assert compute(policy, request, chunk) == 3
    assert compute(policy, request, request.remaining) == 4


def test_the_cost_of_decodes_is_predicted_once_per_iteration() -> None:
    cost = CountingCost()
    policy = SkipJoinMLFQ(cost)
    requests = [a_request(number, 1, 99) for number in range(256)]
    for request in requests:
        policy.arrive(request, 0.0)
        compute(policy, request, 1)
        request.num_computed += 1
    cost.num_calls = 0
    for request in requests:  # each uses half of its quantum
        policy.ran(request, 1, 5.0, 5.0)
    assert cost.num_calls == 2


def test_ordering_a_batch_predicts_no_cost_for_any_number_of_requests() -> None:
    asked: list[int] = []

    class Counting(CostModel):
        def compute(self, num_tokens: int, start: int) -> float:
            asked.append(num_tokens)
            return super().compute(num_tokens, start)

    policy = SkipJoinMLFQ(Counting(HAND_COST.curve, 0.0, 0.0))
    for number in range(2000):
        policy.arrive(a_request(number, 1 + number % 50, 9), 0.0)
    asked.clear()
    order = policy.order(1.0)
    assert [next(order).prompt_len for _ in range(3)] == [1, 1, 1]
    assert not asked


def test_the_next_scheduled_time_is_that_of_the_demotions_above_or_of_the_promotion() -> None:
    policy = SkipJoinMLFQ(HAND_COST, PolicySettings(starvation_seconds=30.0, seats=2))
    lengths = (1, 1, 4, 15, 31)  # levels 0, 0, 2, 3, 4
    requests = [a_request(number, length, 9) for number, length in enumerate(lengths)]
    for request in requests:
        policy.arrive(request, 0.0)
    assert [policy.level(request) for request in requests] == [0, 0, 2, 3, 4]
    # Two sink through quanta of 1 and 2 seconds, then three through 4, four through 8; two seats.
    assert policy.next_scheduled_times(requests, 0.0) == [0.0, 0.5, 3.0, 9.0, 25.0]
    assert policy.next_scheduled_times(requests, 20.0) == [0.0, 0.5, 3.0, 9.0, 10.0]
