"""The contract of `Policy`: no request is lost, doubled, or starved beyond the bound."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import cast

import pytest

from engine.control.admission import Admission, SwapMode
from engine.policy import POLICIES, RESEARCH, Policy, PolicySettings, build
from engine.policy.mlfq import SkipJoinMLFQ
from engine.policy.waiting import MAX_AT_ONCE
from engine.request import Abort, Request, RequestSpec, State, Times
from engine.step import RequestId
from tests.scheduling import (
    HAND_COST,
    a_request,
    a_scheduler,
    a_spec,
    commit_iteration,
    planned,
    play,
    run_iteration,
)

STARVATION_SECONDS = 20.0
DEFAULT = PolicySettings()
OVER = {  # a goal and fair shares over a policy
    "mlfq, goal": ("mlfq", replace(DEFAULT, ttft_goal=6.0)),
    "mlfq, fair": ("mlfq", replace(DEFAULT, fair_keys=True)),
    "mlfq, goal, fair": ("mlfq", replace(DEFAULT, ttft_goal=6.0, fair_keys=True)),
}
NAMES = [*POLICIES, *RESEARCH, *OVER]


def make(name: str, starvation_seconds: float | None = STARVATION_SECONDS) -> Policy:
    name, settings = OVER.get(name, (name, DEFAULT))
    settings = replace(settings, starvation_seconds=starvation_seconds)
    return build(name, HAND_COST, settings, serves=False)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make(request.param)


def any_spec(random: Random) -> RequestSpec:
    """Lengths, tenants, priorities and first-token deadlines of all kinds."""
    return a_spec(
        random.randint(1, 20),
        random.randint(1, 12),
        priority=random.randint(-1, 1),
        tenant=random.choice("abc"),
        weight=random.choice([1.0, 2.0]),
        ttft_deadline=random.choice([None, 500.0, 1000.0]),
        is_background=random.random() < 0.2,
    )


def test_the_order_has_each_live_request_exactly_once(policy: Policy) -> None:
    random = Random(1)
    live: dict[int, Request] = {}
    started: dict[Request, None] = {}
    now = 0.0
    for number in range(300):
        now += random.random()
        request = Request(RequestId(number), any_spec(random), Times(now))
        live[number] = request
        policy.arrive(request, now)
        for other in random.sample(list(live.values()), min(len(live), 4)):
            policy.start(other)
            started[other] = None
            done = random.randint(1, other.remaining)
            other.num_computed += done
            policy.ran(other, done, HAND_COST.compute(done, 0), now)
            if not other.remaining:
                other.output.append(5)
        if random.random() < 0.8:
            gone = live.pop(random.choice(list(live)))
            policy.leave(gone, now)
            started.pop(gone, None)
        order = list(policy.order(now))
        assert len(order) == len(live)
        assert {request.request_id for request in order} == live.keys()
        keys = policy.sort_keys(order, now)
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)
        expected = [request for request in order if request in started]
        assert list(policy.started_order(started, now)) == expected
        assert list(policy.started_order(started, now, reverse=True)) == expected[::-1]
        some = random.sample(order, len(order) // 2)
        assert len(policy.next_scheduled_times(some, now)) == len(some)
    for request in list(live.values()):
        policy.leave(request, now)
    assert list(policy.order(now)) == []


def test_the_order_is_the_same_when_computed_again_at_the_same_time(policy: Policy) -> None:
    random = Random(2)
    for number in range(40):
        policy.arrive(Request(RequestId(number), any_spec(random), Times(0.0)), 0.0)
    for now in (0.0, 10.0, STARVATION_SECONDS, 3 * STARVATION_SECONDS):
        outer = policy.order(now)
        first = [next(outer), next(outer)]
        inner = list(policy.order(now))  # a second walk during the first
        assert first + list(outer) == inner


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_served_in_full_and_the_schedule_is_deterministic(
    name: str, admission: Admission
) -> None:
    def run() -> list[tuple[float | None, int]]:
        random = Random(3)
        moments = sorted(random.uniform(0.0, 75.0) for _ in range(30))
        arrivals = [(at, any_spec(random)) for at in moments]
        scheduler = a_scheduler(make(name), num_blocks=64, max_batch_size=3, admission=admission)
        requests = play(scheduler, arrivals)
        assert all(request.state is State.FINISHED for request in requests)
        assert all(request.produced == request.spec.max_tokens for request in requests)
        return [
            (request.times.last_token_at, request.setbacks.num_preemptions) for request in requests
        ]

    assert run() == run()


@pytest.mark.parametrize("swap", SwapMode)
def test_no_request_starves_under_endless_favoured_arrivals(policy: Policy, swap: SwapMode) -> None:
    """Endless arrivals fill every seat: shorter, more urgent, and due earlier. The one request of
    another tenant is served to its end nevertheless."""
    scheduler = a_scheduler(policy, num_blocks=40, num_host_blocks=80, swap=swap)
    wanted = a_spec(9, 6, priority=5, tenant="modest")
    favoured = a_spec(1, 1, priority=0, tenant="greedy", ttft_deadline=15.0)
    now, arrived = 0.0, 0
    disfavoured = scheduler.add(wanted, now)
    while not disfavoured.state.is_terminal:
        while arrived <= now:
            scheduler.add(favoured, now)
            arrived += 1
        now = run_iteration(scheduler, now)
        waited = now - (disfavoured.times.last_token_at or disfavoured.times.arrived_at)
        assert waited <= 2 * STARVATION_SECONDS + 10.0
    assert disfavoured.state is State.FINISHED


@pytest.mark.parametrize(("before", "after"), list(permutations(NAMES, 2)))
def test_switching_policies_loses_no_request(before: str, after: str) -> None:
    random = Random(4)
    scheduler = a_scheduler(make(before), num_blocks=60, max_batch_size=3)
    requests = [scheduler.add(any_spec(random), 0.0) for _ in range(12)]
    now = 0.0
    for _ in range(6):
        now = run_iteration(scheduler, now)
    in_flight = planned(scheduler, now)
    gone = in_flight.requests[0]
    scheduler.cancel(gone, Abort.CLIENT_GONE, now)
    live = set(scheduler.pool)
    scheduler.switch(make(after), now)
    assert set(scheduler.policy.order(now)) == live
    now = commit_iteration(scheduler, in_flight, now)
    while scheduler.pool:
        now = run_iteration(scheduler, now)
    assert all(request.state is State.FINISHED for request in requests if request is not gone)


class CountingPolicy:
    """Counts how many requests `order` has yielded, whichever policy makes the order."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.num_yielded = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def order(self, now: float) -> Iterator[Request]:
        for request in self.inner.order(now):
            self.num_yielded += 1
            yield request


@pytest.mark.parametrize("num_host_slots", [0, 400])
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_walks_a_bounded_part_of_the_order(name: str, num_host_slots: int) -> None:
    """Blocks are short, some started requests are at the end of the order, and 600 wait."""
    policy = CountingPolicy(make(name, starvation_seconds=None))
    scheduler = a_scheduler(
        cast("Policy", policy),
        num_blocks=150,
        num_host_blocks=num_host_slots,
        max_batch_size=8,
        max_batch_tokens=64,
        max_queue_requests=9999,
    )
    for number in range(12):
        scheduler.add(a_spec(8, 60, tenant="ab"[number % 2]), 0.0)
    now = 0.0
    for _ in range(20):
        now = run_iteration(scheduler, now)
    for number in range(600):
        scheduler.add(a_spec(8, 60, tenant="ab"[number % 2], priority=-1), now)
    for _ in range(10):
        policy.num_yielded = 0
        now = run_iteration(scheduler, now)
        assert policy.num_yielded <= 100


def test_one_order_promotes_a_bounded_number_of_starving_requests() -> None:
    """The others are promoted by the next ones, so that no plan waits for a whole queue."""
    policy = SkipJoinMLFQ(HAND_COST, PolicySettings(starvation_seconds=5.0))
    for number in range(1000):
        policy.arrive(a_request(number, 7, 9), 0.0)
    for now, num_promoted in ((6.0, MAX_AT_ONCE), (7.0, 2 * MAX_AT_ONCE)):
        order = list(policy.order(now))
        assert list(policy.order(now)) == order
        assert sum(policy.level(request) == 0 for request in order) == num_promoted
        assert [request.request_id for request in order] == list(range(1000))
