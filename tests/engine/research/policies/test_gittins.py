"""The Gittins policy: ranks against brute force, levels, FCFS's tail, and what it learns."""

from collections.abc import Sequence
from itertools import accumulate
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.policy import PolicySettings
from engine.request import Abort, FinishReason, Request, State
from engine.research.policies import rank
from engine.research.policies.gittins import GittinsIndex
from engine.research.policies.lengths import EDGES, NUM_BINS, LearnedLengths, bin_of
from engine.research.policies.level_queues import KINDS_PER_PLAN
from engine.research.policies.rank import MIN_RANK, gittins_rank
from tests.scheduling import (
    HAND_COST,
    a_request,
    a_scheduler,
    a_spec,
    build_learned,
    learn,
    learned_lengths,
    play,
)

SKEWED = [1] * 40 + [2] * 30 + [4] * 20 + [1000] * 10
ALIKE = [100] * 100


def a_policy(lengths: Sequence[int], **settings: object) -> GittinsIndex:
    policy = GittinsIndex(HAND_COST, PolicySettings(**settings))  # type: ignore[arg-type]
    learn(policy.lengths, lengths)
    for length in lengths:
        policy.variation.ended(float(length))
    return policy


def arrived(policy: GittinsIndex, number: int, prompt_len: int = 1) -> Request:
    request = a_request(number, prompt_len, 2000)
    policy.arrive(request, 0.0)
    return request


def produce(policy: GittinsIndex, request: Request, num_tokens: int, now: float = 1.0) -> None:
    """The request runs alone until it has produced so many more tokens."""
    for _ in range(num_tokens):
        done = request.remaining
        request.num_computed += done
        policy.ran(request, done, 1.0, now)
        request.output.append(5)


def brute_force(hazards: Sequence[float], age_bin: int, prefill: float, cap: int) -> float:
    """The least ratio over all horizons, from the probability of each length: an output that ends
    in a bin ends in its middle on average."""
    alive = list(accumulate((1.0 - h for h in hazards), lambda a, b: a * b, initial=1.0))
    start = EDGES[age_bin]
    ends = {k: (alive[k] - alive[k + 1]) / alive[age_bin] for k in range(age_bin, cap)}
    ratios = []
    for last in range(age_bin, cap):
        horizon = EDGES[last + 1] - start
        within = sum(ends[k] for k in range(age_bin, last + 1))
        middles = ((EDGES[k] + EDGES[k + 1]) / 2 - start for k in range(age_bin, last + 1))
        shorter = sum(ends[k] * m for k, m in zip(range(age_bin, last + 1), middles, strict=True))
        if within > 0.0:
            ratios.append((prefill + shorter + (1.0 - within) * horizon) / within)
            if last == cap - 1:  # `max_tokens`: it ends for certain
                ratios.append(prefill + shorter + (1.0 - within) * horizon)
    return max(MIN_RANK, min(ratios))


@given(
    hazards=st.lists(st.floats(0.001, 0.9), min_size=NUM_BINS, max_size=NUM_BINS),
    age_bin=st.integers(0, 40),
    prefill=st.floats(0.0, 100.0),
    more=st.integers(1, 30),
)
def test_ranks_are_those_of_brute_force(
    hazards: list[float], age_bin: int, prefill: float, more: int
) -> None:
    cap = age_bin + more
    found = gittins_rank(hazards, age_bin, prefill, cap)
    assert isclose(found, brute_force(hazards, age_bin, prefill, cap), rel_tol=1e-6)


def test_ranks_fall_with_age_if_outputs_are_alike_and_rise_if_they_are_skewed() -> None:
    def ranks(lengths: Sequence[int]) -> list[float]:
        hazards = learned_lengths(lengths).hazards()
        return [gittins_rank(hazards, bin_of(age), 0.0, NUM_BINS - 1) for age in (1, 5, 50)]

    alike, skewed = ranks(ALIKE), ranks(SKEWED)
    assert alike == sorted(alike, reverse=True)
    assert skewed == sorted(skewed)


def test_until_enough_outputs_have_ended_the_order_is_that_of_arrival() -> None:
    policy = GittinsIndex(HAND_COST, PolicySettings(min_outputs=2, fcfs_slack=100.0))
    for work in SKEWED:
        policy.variation.ended(float(work))
    long, short = arrived(policy, 0, 100), arrived(policy, 1, 1)
    for number in (7, 8):
        assert list(policy.order(float(number))) == [long, short]
        other = arrived(policy, number)
        produce(policy, other, 1)
        other.finish = FinishReason.STOP
        policy.leave(other, float(number))
    assert list(policy.order(9.0)) == [short, long]


def test_while_the_work_of_requests_varies_little_the_order_is_that_of_arrival() -> None:
    policy = GittinsIndex(HAND_COST)
    learn(policy.lengths, SKEWED)
    long, short = arrived(policy, 0, 100), arrived(policy, 1, 1)
    for _ in range(100):
        policy.variation.ended(100.0)
    assert list(policy.order(1.0)) == [long, short]
    for work in SKEWED:
        policy.variation.ended(float(work))
    assert list(policy.order(3.0)) == [short, long]


def test_a_new_request_overtakes_a_started_one_if_outputs_are_skewed() -> None:
    policy = a_policy(SKEWED)
    old = arrived(policy, 0)
    produce(policy, old, 20)
    new = arrived(policy, 1)
    assert list(policy.order(1.0)) == [new, old]
    assert policy.sort_keys([new], 1.0) < policy.sort_keys([old], 1.0)


def test_no_request_overtakes_a_started_one_if_outputs_are_alike() -> None:
    policy = a_policy(ALIKE)
    requests = [arrived(policy, number, prompt_len=1 + number % 3) for number in range(6)]
    produce(policy, requests[0], 20)
    assert list(policy.order(1.0)) == requests


def test_a_started_request_precedes_a_waiting_one_of_the_same_level() -> None:
    policy = a_policy(ALIKE)
    first, second = arrived(policy, 0), arrived(policy, 1)
    produce(policy, second, 1)
    assert list(policy.order(1.0)) == [second, first]


def test_short_prompts_go_first_in_queues_by_kind_and_arrival_decides_within_one() -> None:
    policy = a_policy(SKEWED)
    requests = [arrived(policy, number, length) for number, length in enumerate((90, 1, 90, 1))]
    assert list(policy.order(0.0)) == [requests[i] for i in (1, 3, 0, 2)]
    assert sum(policy.level_sizes) == 4
    assert policy.level(requests[0]) > policy.level(requests[1])


def test_with_a_starvation_limit_a_request_that_waits_longer_goes_first_until_it_ends() -> None:
    policy = a_policy(SKEWED, starvation_seconds=10.0)
    old = arrived(policy, 0)
    produce(policy, old, 20, now=1.0)
    new = arrived(policy, 1)
    assert next(policy.order(10.5)) is new
    assert next(policy.order(12.0)) is old
    produce(policy, old, 20, now=13.0)
    assert next(policy.order(14.0)) is old
    assert policy.level(old) == 0
    policy.leave(old, 15.0)
    assert next(policy.order(15.0)) is new


def test_sort_keys_ascend_in_the_order_of_requests_that_go_first() -> None:
    """Started ones precede waiting ones, which would take their seats otherwise."""
    policy = a_policy(SKEWED, starvation_seconds=1.0)
    requests = [arrived(policy, number) for number in range(4)]
    for request in requests[1::2]:
        produce(policy, request, 3, now=1.0)
    order = list(policy.order(20.0))
    assert [policy.level(request) for request in order] == [0] * 4
    assert order == [*requests[1::2], *requests[::2]]
    keys = policy.sort_keys(order, 20.0)
    assert keys == sorted(keys)


def test_a_request_that_lags_behind_fcfs_goes_first_until_it_ends() -> None:
    """One seat, which the long request would have kept under FCFS. A short one overtakes it until
    the next time that lags are computed."""
    policy = a_policy(SKEWED, seats=1)
    long = arrived(policy, 0)
    for now in range(1, 21):
        produce(policy, long, 1, float(now))
    short = arrived(policy, 1)
    assert next(policy.order(21.0)) is short
    for now in range(22, 26):
        produce(policy, short, 1, float(now))
        list(policy.order(float(now)))
    assert policy.level(long) == 0
    assert list(policy.order(40.0)) == [long, short]


def test_ends_are_learned_and_cuts_are_censored() -> None:
    def learned(finish: FinishReason | None, abort: Abort | None = None) -> LearnedLengths:
        policy = GittinsIndex(HAND_COST)
        request = arrived(policy, 0)
        produce(policy, request, 5)
        request.finish, request.abort = finish, abort
        policy.leave(request, 1.0)
        return policy.lengths

    for ended in (learned(FinishReason.STOP), learned(None, Abort.STOP_STRING)):
        assert ended.num_observed == 1
        assert ended.hazards()[bin_of(5)] > 0.5
    for cut in (learned(FinishReason.LENGTH), learned(None, Abort.CLIENT_GONE)):
        assert cut.num_observed == 0
        assert cut.hazards()[bin_of(4)] < 0.1


def test_many_waiting_requests_of_one_kind_cost_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = a_policy(SKEWED)
    for number in range(3000):
        arrived(policy, number, prompt_len=9)
    calls: list[float] = []

    def counted(hazards: Sequence[float], age_bin: int, prefill: float, cap: int) -> float:
        calls.append(prefill)
        return gittins_rank(hazards, age_bin, prefill, cap)

    monkeypatch.setattr(rank, "gittins_rank", counted)
    next(policy.order(0.0))
    assert len(calls) == 1


def test_new_ranks_of_many_kinds_are_computed_over_several_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = a_policy(SKEWED)
    requests = [arrived(policy, number, prompt_len=1 + number * number) for number in range(100)]
    strata: list[int] = []
    hazards = LearnedLengths.stratum_hazards

    def counted(lengths: LearnedLengths, stratum: int, general: list[float]) -> list[float]:
        strata.append(stratum)
        return hazards(lengths, stratum, general)

    monkeypatch.setattr(LearnedLengths, "stratum_hazards", counted)
    for plan in range(10):
        num_known = len(strata)
        assert len([*policy.order(0.001 * plan)]) == 100
        assert len(strata) <= num_known + KINDS_PER_PLAN
    assert len(strata) == len(set(strata)) > KINDS_PER_PLAN, "each kind's ranks are computed once"
    levels = [policy.level(request) for request in requests]
    assert levels == sorted(levels), "shorter prompts precede longer ones"
    assert len(set(levels)) > 5


def test_a_skewed_load_is_served_in_full_with_a_lower_mean_than_fcfs() -> None:
    """One seat; every tenth request is long. All are served to their end under both."""
    arrivals = [(5.0 * n, a_spec(1, 40 if n % 10 == 0 else 1)) for n in range(60)]

    def mean_jct(name: str) -> float:
        settings = PolicySettings(seats=1, min_outputs=10, fcfs_slack=1.0)
        scheduler = a_scheduler(build_learned(name, settings, [1] * 90 + [40] * 10))
        requests = play(scheduler, arrivals)
        assert all(request.state is State.FINISHED for request in requests)
        return sum((r.times.last_token_at or 0.0) - r.times.arrived_at for r in requests) / len(
            requests
        )

    assert mean_jct("gittins") < mean_jct("fcfs")
