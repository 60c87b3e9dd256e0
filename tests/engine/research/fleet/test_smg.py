from dataclasses import replace

from engine.cost.model import CostModel
from engine.research.fleet.router import OVERLOADED, POLL_SECONDS, Loads, SmgCacheAware
from engine.research.fleet.shard import LoadReport
from engine.simulated.trace import Arrival

COST = CostModel.linear(per_step=0.01, per_token=0.001, per_slot=0.0)


def chat(*blocks: int, at: float = 0.0) -> Arrival:
    return Arrival(at, 512 * len(blocks) + 8, 10, blocks)


def idle(replica: int) -> LoadReport:
    return LoadReport(replica, 0, 0, 0, 0, 0.0)


def with_rate(replica: int, rate: float) -> LoadReport:
    return idle(replica)._replace(throughput=rate)


def fleet(count: int, seed: int = 0) -> tuple[Loads, SmgCacheAware]:
    """Idle workers that have reported, and the router."""
    loads = Loads(count, seed)
    loads.activate(range(count))
    return loads, SmgCacheAware(loads, COST, 1000)


def test_a_request_counts_until_the_next_poll_also_when_it_has_ended() -> None:
    loads, router = fleet(2)
    first = router.route(chat(1))
    loads.report(idle(first))  # it has ended
    assert router.route(chat(2)) == 1 - first
    third = router.route(chat(3))
    loads.report(idle(third))
    assert router.route(chat(4)) == 1 - third


def test_equal_workers_are_chosen_at_random_and_equally_for_equal_seeds() -> None:
    def choices(seed: int) -> list[int]:
        _, router = fleet(4, seed)
        return [router.route(chat(number)) for number in range(12)]

    assert choices(1) == choices(1)
    assert len({tuple(choices(seed)) for seed in range(8)}) > 4
    assert sorted(choices(1)) == sorted([0, 1, 2, 3] * 3)


def test_the_next_message_of_a_chat_follows_the_longest_prefix() -> None:
    _, router = fleet(2)
    first = router.route(chat(1, 2))
    for number in range(3):
        assert router.route(chat(1, 2, *range(10, 11 + number))) == first
    assert router.route(chat(1, 7, 8, 9)) != first  # a quarter matches, and the other has less


def test_a_worker_is_left_out_from_the_poll_at_which_it_has_many_waiting_until_the_next() -> None:
    loads, router = fleet(2)
    first = router.route(chat(1, at=0.0))
    loads.report(LoadReport(first, OVERLOADED, OVERLOADED, 0, 0, 0.0))
    assert router.route(chat(1, at=POLL_SECONDS - 0.1)) == first  # not polled yet
    assert router.route(chat(1, at=POLL_SECONDS)) == 1 - first
    loads.report(idle(first))
    loads.report(idle(1 - first))
    assert router.route(chat(5, at=2 * POLL_SECONDS - 0.1)) == 1 - first
    later = {router.route(chat(number, at=2 * POLL_SECONDS)) for number in range(20, 30)}
    assert later == {0, 1}


def test_the_one_with_the_fewest_requests_is_used_if_all_workers_have_many_waiting() -> None:
    loads, router = fleet(2)
    loads.report(LoadReport(0, 12, OVERLOADED, 0, 0, 0.0))
    loads.report(LoadReport(1, 10, OVERLOADED, 0, 0, 0.0))
    assert [router.route(chat(number)) for number in range(2)] == [1, 1]


def test_a_holder_far_above_the_mean_gives_its_prefix_to_another_worker() -> None:
    loads, router = fleet(2)
    first = router.route(chat(1, 2))
    loads.report(LoadReport(first, 20, 0, 0, 0, 0.0))
    assert router.route(chat(1, 2)) == 1 - first
    loads.report(idle(first))
    loads.report(LoadReport(1 - first, 20, 0, 0, 0, 0.0))
    assert router.route(chat(1, 2)) == first  # both hold it now


def test_a_faster_worker_gets_more_of_the_new_chats() -> None:
    loads, router = fleet(2)
    loads.report(with_rate(0, 4000.0))
    loads.report(with_rate(1, 1000.0))
    chosen = [router.route(chat(number)) for number in range(50)]
    assert chosen.count(0) == 40


def test_a_full_kv_cache_adds_to_the_wait() -> None:
    loads, router = fleet(2)
    loads.report(idle(0)._replace(usage=0.9))  # 1.35 s: between two and three requests
    assert [router.route(chat(number)) for number in range(3)] == [1, 1, 1]
    assert router.route(chat(4)) == 0


def test_a_worker_without_a_report_has_the_least_wait_of_the_others() -> None:
    loads = Loads(2, 3)
    loads.activate([0])
    router = SmgCacheAware(loads, COST, 1000)
    for number in range(5):
        router.route(chat(number))
    loads.activate([0, 1])
    arrivals = [replace(chat(number), at=1.0) for number in range(10, 40)]
    chosen = []
    for arrival in arrivals:  # each ends at once
        chosen.append(router.route(arrival))
        loads.report(idle(chosen[-1]))
    assert 5 < chosen.count(1) < 25  # equal waits, so at random
