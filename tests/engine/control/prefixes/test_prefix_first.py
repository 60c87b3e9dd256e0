"""`prefix_first`: the longest cached prefix starts first, within a window and boundedly often."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.scheduler import IterationScheduler
from engine.kv.prefix_search import PrefixSearch
from engine.request import Request, RequestSpec
from tests.engine.control.test_scheduler import GREEDY, make, run_iteration

BLOCK = 4


def prompt(family: int, num_shared: int, own: int) -> RequestSpec:
    """`num_shared` blocks in common with its family, and a block of its own."""
    tokens = (1000 + family,) * BLOCK * num_shared + (own,) * BLOCK
    return RequestSpec(tokens, 2, GREEDY)


def a_scheduler(window: int, seats: int = 1) -> IterationScheduler:
    """With the blocks of family 0 in the cache."""
    scheduler = make(
        num_blocks=400,
        block_size=BLOCK,
        max_batch_size=seats,
        max_batch_tokens=64,
        reuses_prefixes=True,
        prefix_first=window,
    )
    scheduler.add(prompt(0, 8, 1), 0.0)
    while scheduler.pool:
        run_iteration(scheduler)
    return scheduler


def starts(scheduler: IterationScheduler, requests: Sequence[Request]) -> list[int]:
    """The positions of the requests in the order in which they start."""
    found: list[int] = []
    while scheduler.pool:
        run_iteration(scheduler)
        found += [
            place
            for place, request in enumerate(requests)
            if request.admitted_at is not None and place not in found
        ]
    return found


@pytest.mark.parametrize(
    ("window", "order"),
    [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [1, 0, 2, 3]), (3, [2, 1, 0, 3]), (4, [2, 1, 0, 3])],
)
def test_of_a_window_the_longest_cached_prefix_starts_first(window: int, order: list[int]) -> None:
    """The first one has nothing in the cache, so that others overtake it. (With one seat, it runs
    before them from then on.)"""
    scheduler = a_scheduler(window)
    specs = [prompt(5, 8, 9), prompt(0, 2, 10), prompt(0, 8, 11), prompt(0, 1, 12)]
    requests = [scheduler.add(spec, 0.0) for spec in specs]
    assert starts(scheduler, requests) == order


def test_among_equal_prefixes_the_policy_decides() -> None:
    scheduler = a_scheduler(window=4)
    requests = [scheduler.add(prompt(0, 3, number), 0.0) for number in range(10, 16)]
    assert starts(scheduler, requests) == [0, 1, 2, 3, 4, 5]


@given(
    window=st.integers(1, 5),
    seats=st.integers(1, 3),
    kinds=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), min_size=2, max_size=25),
)
def test_no_request_is_overtaken_more_often_than_the_window_is_long(
    window: int, seats: int, kinds: list[tuple[int, int]]
) -> None:
    scheduler = a_scheduler(window, seats)
    specs = [prompt(family, shared, 10 + own) for own, (family, shared) in enumerate(kinds)]
    requests = [scheduler.add(spec, 0.0) for spec in specs]
    batches: list[set[int]] = []
    waiting = set(range(len(requests)))
    while scheduler.pool:
        run_iteration(scheduler)
        began = {place for place in waiting if requests[place].admitted_at is not None}
        batches.append(began)
        waiting -= began
    assert not waiting, "every request starts"
    for number, began in enumerate(batches):
        before = [place for batch in batches[:number] for place in batch]
        for place in began:
            overtaken = sum(other > place for other in before)
            assert overtaken <= window


def test_prefixes_of_requests_behind_the_window_are_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = a_scheduler(window=8)
    requests = [scheduler.add(prompt(0, 8, 10 + number), 0.0) for number in range(500)]
    run_iteration(scheduler)
    found: list[Request] = []
    find = PrefixSearch.find

    def counted(search: PrefixSearch, request: Request) -> bool:
        found.append(request)
        return find(search, request)

    monkeypatch.setattr(PrefixSearch, "find", counted)
    while not found:
        run_iteration(scheduler)
    assert len(set(found)) <= 9
    assert set(found) <= set(requests[:10])


@pytest.mark.parametrize("window", [0, 2])
def test_the_cached_prefix_of_the_window_is_evicted_after_other_cached_blocks(window: int) -> None:
    """The cache is full of the prefix of the waiting request, which was used first, and of another
    one. A request that starts before it evicts eight blocks."""
    scheduler = make(
        num_blocks=24,
        block_size=BLOCK,
        max_batch_size=1,
        max_batch_tokens=64,
        reuses_prefixes=True,
        prefix_first=window,
    )
    for family in (0, 1):
        scheduler.add(prompt(family, 8, 1 + family), 0.0)
        while scheduler.pool:
            run_iteration(scheduler)
    specs = [prompt(5, 12, 9), prompt(0, 8, 10)]
    first, waiting = (scheduler.add(spec, 0.0) for spec in specs)
    if window:
        first.num_overtaken, waiting.num_overtaken = window, 0  # so that it starts first
    while scheduler.pool:
        run_iteration(scheduler)
    assert first.admitted_at is not None
    assert waiting.num_cached == (8 * BLOCK if window else BLOCK), "one block was not needed"


def test_a_started_request_gets_the_blocks_of_the_window_if_no_others_are_left() -> None:
    scheduler = make(
        num_blocks=12,
        block_size=BLOCK,
        max_batch_size=1,
        max_batch_tokens=64,
        reuses_prefixes=True,
        prefix_first=2,
    )
    scheduler.add(prompt(0, 8, 1), 0.0)
    while scheduler.pool:
        run_iteration(scheduler)
    first, waiting = (scheduler.add(spec, 0.0) for spec in (prompt(5, 10, 9), prompt(0, 8, 10)))
    first.num_overtaken = 2
    while scheduler.pool:
        run_iteration(scheduler)
    assert first.finish is not None
    assert waiting.finish is not None
    assert waiting.num_cached == 0
