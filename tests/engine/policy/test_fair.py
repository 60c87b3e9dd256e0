import pytest

from engine.policy import PolicySettings, build
from engine.policy.fair import VirtualTokenCounter
from engine.request import Request
from tests.scheduling import HAND_COST, a_request, a_scheduler, a_spec, ends, play, run_iteration


def names(policy: VirtualTokenCounter) -> list[str]:
    return [request.spec.tenant for request in policy.order(0.0)]


def test_prompt_tokens_count_once_and_output_tokens_twice_when_computed() -> None:
    policy = VirtualTokenCounter()
    scheduler = a_scheduler(policy)
    scheduler.add(a_spec(10, 9, tenant="a"), 0.0)
    counters = []
    for _ in range(4):
        run_iteration(scheduler, 0.0)
        counters.append(policy.counter("a"))
    assert counters == [8.0, 10.0, 12.0, 14.0]


def test_tokens_found_in_the_cache_cost_nothing() -> None:
    policy = VirtualTokenCounter()
    scheduler = a_scheduler(policy, reuses_prefixes=True)
    for tenant in ("a", "b"):
        scheduler.add(a_spec(8, 2, tenant=tenant), 0.0)
    run_iteration(scheduler, 0.0)
    run_iteration(scheduler, 0.0)
    assert (policy.counter("a"), policy.counter("b")) == (8.0, 1.0)


def test_the_next_request_is_of_the_tenant_with_the_smallest_counter() -> None:
    policy = VirtualTokenCounter()
    for number, (tenant, prompt_len) in enumerate([("a", 4), ("a", 4), ("a", 4), ("b", 2)]):
        policy.arrive(a_request(number, prompt_len, 9, tenant=tenant), 0.0)
    for number in range(4, 7):
        policy.arrive(a_request(number, 2, 9, tenant="b"), 0.0)
    assert names(policy) == ["a", "b", "b", "a", "b", "b", "a"]


def test_a_new_tenant_starts_from_the_smallest_active_counter() -> None:
    policy = VirtualTokenCounter()
    requests = [a_request(number, 200, 9, tenant="ab"[number]) for number in range(2)]
    for request in requests:
        policy.arrive(request, 0.0)
    for request, num_tokens in zip(requests, (100, 70), strict=True):
        policy.ran(request, num_tokens, 1.0, 0.0)
    assert (policy.counter("a"), policy.counter("b")) == (100.0, 70.0)
    policy.arrive(a_request(2, 1, 9, tenant="c"), 0.0)
    assert policy.counter("c") == 70.0


def test_a_tenant_that_leaves_and_returns_keeps_its_counter() -> None:
    policy = VirtualTokenCounter()
    greedy, modest = a_request(0, 200, 9, tenant="greedy"), a_request(1, 200, 9, tenant="modest")
    policy.arrive(greedy, 0.0)
    policy.arrive(modest, 0.0)
    policy.ran(greedy, 100, 1.0, 0.0)
    policy.leave(greedy, 0.0)
    policy.arrive(a_request(2, 1, 9, tenant="greedy"), 0.0)
    assert policy.counter("greedy") == 100.0
    policy.leave(modest, 0.0)
    policy.arrive(a_request(3, 1, 9, tenant="modest"), 0.0)
    assert policy.counter("modest") == 100.0


def test_after_an_idle_time_tenants_start_from_the_last_counter() -> None:
    policy = VirtualTokenCounter()
    request = a_request(0, 50, 9, tenant="a")
    policy.arrive(request, 0.0)
    policy.ran(request, 50, 1.0, 0.0)
    policy.leave(request, 0.0)
    policy.arrive(a_request(1, 1, 9, tenant="b"), 0.0)
    assert policy.counter("b") == 50.0


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_two_busy_tenants_get_tokens_in_proportion_to_their_weights(weight: float) -> None:
    policy = VirtualTokenCounter()
    scheduler = a_scheduler(policy)
    light = [scheduler.add(a_spec(5, 20, tenant="light"), 0.0) for _ in range(9)]
    heavy = [scheduler.add(a_spec(5, 20, tenant="heavy", weight=weight), 0.0) for _ in range(9)]
    for _ in range(120):
        run_iteration(scheduler, 0.0)
        apart = abs(policy.counter("light") - policy.counter("heavy"))
        assert apart <= 5.0  # a prompt; twice the largest charge is the bound of the paper

    def served(requests: list[Request]) -> int:
        return sum(min(r.num_computed, 5) + 2 * r.produced for r in requests)

    assert served(heavy) == pytest.approx(weight * served(light), rel=0.15)


def test_a_greedy_tenant_does_not_delay_a_modest_one() -> None:
    greedy = [(0.0, a_spec(1, 4, tenant="greedy"))] * 10
    modest = (0.5, a_spec(1, 2, tenant="modest"))
    requests = play(a_scheduler(VirtualTokenCounter()), [*greedy, modest])
    assert ends(requests[-1:]) == [4.0]


def test_weights_of_input_and_output_can_be_set() -> None:
    policy = VirtualTokenCounter(settings=PolicySettings(input_weight=3.0, output_weight=7.0))
    request = a_request(0, 4, 9, tenant="a")
    policy.arrive(request, 0.0)
    request.num_computed = 4
    policy.ran(request, 4, 1.0, 0.0)
    request.output.append(5)
    request.num_computed = 5
    policy.ran(request, 1, 1.0, 0.0)
    assert policy.counter("a") == 3.0 * 4 + 7.0


def test_any_policy_orders_the_requests_of_each_tenant() -> None:
    """Shortest first within a tenant; tenants alternate by their counters."""
    settings = PolicySettings(fair_keys=True)
    policy = build("srpt", HAND_COST, settings, serves=False)
    lengths = {0: ("a", 9), 1: ("a", 2), 2: ("b", 7), 3: ("b", 3)}
    requests = [a_request(n, 2, length, tenant=name) for n, (name, length) in lengths.items()]
    for request in requests:
        policy.arrive(request, 0.0)
    assert [request.request_id for request in policy.order(0.0)] == [1, 3, 0, 2]
