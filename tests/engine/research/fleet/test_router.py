from engine.cost.model import CostModel
from engine.research.fleet.router import (
    OVERLOADED,
    LeastForecast,
    LeastTokens,
    Loads,
    PrefixAffinity,
    RoundRobin,
)
from engine.research.fleet.shard import LoadReport
from engine.simulated.trace import Arrival

COST = CostModel.linear(per_step=0.01, per_token=0.001, per_slot=0.0)


def loads(*reports: tuple[int, int, float]) -> Loads:
    """Loads of active replicas, from their live requests, tokens and delays."""
    found = Loads(len(reports))
    found.activate(range(len(reports)))
    for replica, (live, tokens, delay) in enumerate(reports):
        found.report(LoadReport(replica, live, 0, tokens, 0, delay))
    return found


def chat(*blocks: int) -> Arrival:
    return Arrival(0.0, 512 * len(blocks) + 8, 10, blocks)


def test_round_robin_takes_each_active_replica_in_turn() -> None:
    state = loads((0, 0, 0.0), (0, 0, 0.0), (0, 0, 0.0))
    router = RoundRobin(state, COST, 100)
    assert [router.route(chat(1)) for _ in range(4)] == [1, 2, 0, 1]
    state.activate([0, 2])
    assert {router.route(chat(1)) for _ in range(4)} == {0, 2}


def test_least_tokens_counts_what_it_has_routed_since_the_report() -> None:
    router = LeastTokens(loads((1, 1000, 0.0), (1, 700, 0.0)), COST, 100)
    assert [router.route(chat(1)) for _ in range(3)] == [1, 0, 1]


def test_affinity_follows_the_longest_prefix_that_is_long_enough() -> None:
    router = PrefixAffinity(loads((0, 0, 0.0), (0, 0, 0.0)), COST, 100)
    first = router.route(chat(1, 2))
    assert router.route(chat(9)) != first
    assert router.route(chat(1, 2, 3)) == first
    assert router.route(chat(1, 7, 8, 9)) != first  # a quarter matches


def test_affinity_leaves_an_overloaded_replica_alone() -> None:
    state = loads((0, 0, 0.0), (0, 0, 0.0))
    router = PrefixAffinity(state, COST, 100)
    first = router.route(chat(1))
    state.report(LoadReport(first, OVERLOADED, OVERLOADED, 0, 0, 0.0))
    assert router.route(chat(1)) == 1 - first


def test_affinity_gives_way_to_balance() -> None:
    state = loads((0, 0, 0.0), (0, 0, 0.0))
    router = PrefixAffinity(state, COST, 100)
    first = router.route(chat(1))
    state.report(LoadReport(first, 40, 0, 0, 0, 0.0))
    assert router.route(chat(1)) == 1 - first


def test_a_router_forgets_prefixes_that_a_replica_has_no_room_for() -> None:
    router = PrefixAffinity(loads((0, 0, 0.0), (0, 0, 0.0)), COST, 2)
    first = router.route(chat(1, 2))
    others = [router.route(chat(*range(10 * n, 10 * n + 2))) for n in range(2, 6)]
    assert first in others  # which overwrites its two blocks
    last = router.route(chat(1, 2))
    assert last == router.route(chat(1, 2))


def test_the_forecast_weighs_the_cached_prefix_against_the_delay() -> None:
    state = loads((0, 0, 0.0), (0, 0, 0.0))
    router = LeastForecast(state, COST, 100)
    first = router.route(chat(1, 2))
    state.report(LoadReport(first, 0, 0, 0, 0, 0.9))
    assert router.route(chat(1, 2, 3)) == first  # saves 1.024 s
    state.report(LoadReport(first, 0, 0, 0, 0, 1.1))
    state.report(LoadReport(1 - first, 0, 0, 0, 0, 0.0))
    assert router.route(chat(1, 2, 4)) == 1 - first


def test_the_forecast_counts_the_delay_of_live_requests() -> None:
    router = LeastForecast(loads((9, 0, 0.0), (2, 0, 1.0), (1, 0, 5.0)), COST, 100)
    assert router.route(chat(1)) == 1  # 0.5 s of prefill: 4.7 s, 2.0 s and 5.5 s of delay


def test_no_router_chooses_an_inactive_replica() -> None:
    for router in (RoundRobin, LeastTokens, PrefixAffinity, LeastForecast):
        state = loads((0, 0, 0.0), (0, 0, 0.0), (0, 0, 0.0))
        made = router(state, COST, 100)
        for _ in range(6):
            made.route(chat(1))
        state.activate([1])
        assert {made.route(chat(1)) for _ in range(3)} == {1}
