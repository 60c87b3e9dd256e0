from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import UNMEASURED
from engine.kv.ledger import KVLedger
from engine.kv.lower_tiers import LowerTier
from engine.kv.prefix import EvictionOrder
from engine.kv.retention import RetainedNames
from engine.kv_shape import KVShape
from engine.policy import build
from engine.request import Caching, Request, RequestSpec
from tests.scheduling import GREEDY, a_spec, run_iteration

BLOCK = 4
NUM_BLOCKS = 16


def a_small_scheduler() -> IterationScheduler:
    ledger = KVLedger(KVShape(NUM_BLOCKS, BLOCK))
    return IterationScheduler(SchedulerSettings(64, 4), ledger, build("fcfs", UNMEASURED))


def serve(
    scheduler: IterationScheduler, content: int, now: float, seconds: float = 0.0, tenant: str = "a"
) -> Request:
    """A request of three full blocks, of which two can be found again, until it has ended."""
    caching = Caching(seconds=seconds)
    prompt = (content,) * (3 * BLOCK)
    request = scheduler.add(RequestSpec(prompt, 1, GREEDY, tenant=tenant, caching=caching), now)
    while scheduler.pool:
        run_iteration(scheduler, now)
        scheduler.kv.ledger.check()
    return request


def num_cached(scheduler: IterationScheduler, content: int, now: float) -> int:
    return serve(scheduler, content, now).num_cached


def test_a_retained_prefix_survives_a_flood_until_its_time_is_over() -> None:
    scheduler = a_small_scheduler()
    serve(scheduler, 1, 0.0, seconds=100.0)
    serve(scheduler, 2, 0.0)
    for content in range(10, 30):
        serve(scheduler, content, 50.0)
    assert num_cached(scheduler, 2, 60.0) == 0
    assert num_cached(scheduler, 1, 60.0) == 2 * BLOCK
    for content in range(30, 50):
        serve(scheduler, content, 100.0)
    assert num_cached(scheduler, 1, 101.0) == 0


def test_what_another_request_left_is_retained_by_one_that_goes_on_there() -> None:
    scheduler = a_small_scheduler()
    serve(scheduler, 1, 0.0)
    serve(scheduler, 1, 1.0, seconds=100.0)
    for content in range(10, 30):
        serve(scheduler, content, 2.0)
    assert num_cached(scheduler, 1, 3.0) == 2 * BLOCK


def test_retained_pages_give_way_where_nothing_else_is_left() -> None:
    scheduler = a_small_scheduler()
    for content in range(1, 9):
        serve(scheduler, content, 0.0, seconds=100.0)
    assert len(scheduler.kv.ledger.pool.retained.names) == NUM_BLOCKS // 2
    request = scheduler.add(a_spec(NUM_BLOCKS * BLOCK - 2, 1), 1.0)
    run_iteration(scheduler, 1.0)
    assert request.produced == 1


def test_a_tenant_with_more_does_not_end_the_retention_of_one_with_less() -> None:
    scheduler = a_small_scheduler()
    serve(scheduler, 1, 0.0, seconds=100.0, tenant="small")
    for content in range(10, 30):
        serve(scheduler, content, 1.0, seconds=1000.0, tenant="large")
    assert num_cached(scheduler, 1, 2.0) == 2 * BLOCK


def test_a_tenant_keeps_what_was_retained_first_and_shares_equally() -> None:
    names = RetainedNames(4)
    for name in (b"a", b"b", b"c", b"d", b"e"):
        assert names.retain(name, 10.0, "one") is None
    assert b"d" in names.names
    assert b"e" not in names.names
    assert names.retain(b"f", 10.0, "two") == b"d"
    assert names.retain(b"g", 10.0, "two") == b"c"
    assert names.retain(b"h", 10.0, "two") is None
    assert list(names.expire(10.0)) == [b"a", b"b", b"f", b"g"]


def test_an_end_is_the_latest_that_was_asked_for() -> None:
    names = RetainedNames(2)
    names.retain(b"a", 10.0, "")
    names.retain(b"a", 5.0, "")
    assert list(names.expire(9.0)) == []
    names.retain(b"a", 20.0, "")
    assert list(names.expire(19.0)) == []
    assert list(names.expire(20.0)) == [b"a"]
    assert not names.names


def test_what_is_asked_for_again_and_again_takes_no_more_memory() -> None:
    names = RetainedNames(2)
    for until in range(1000):
        names.retain(b"a", float(until), "")
    assert len(names._ends) <= 9
    assert list(names.expire(999.0)) == [b"a"]


def test_a_lower_tier_replaces_retained_copies_last() -> None:
    tier = LowerTier.of_size(2)
    tier.retained = RetainedNames(1)
    for name in (b"a", b"b"):
        tier.put(name)
        tier.finish_put(name, is_complete=True)
    tier.retained.retain(b"a", 1.0, "")
    tier.order.sort(b"a", is_retained=True)
    tier.put(b"c")
    assert b"a" in tier
    assert b"b" not in tier
    assert list(tier.retained.expire(1.0)) == [b"a"]
    tier.order.sort(b"a", is_retained=False)
    tier.finish_put(b"c", is_complete=True)
    tier.put(b"d")
    assert b"a" not in tier


def test_keys_are_evicted_in_their_order() -> None:
    order = EvictionOrder[int]()
    for key in range(4):
        order.add(key, is_retained=key == 0)
    assert [*order] == [1, 2, 3, 0]
    order.sort(2, is_retained=True)
    order.sort(0, is_retained=False)
    assert [*order] == [0, 1, 3, 2]
    assert order.remove(1)
    assert not order.remove(1)
    assert 1 not in order
    assert len(order) == 3
