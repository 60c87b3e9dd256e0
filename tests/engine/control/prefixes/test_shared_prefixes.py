from dataclasses import replace

import pytest

from engine.control.scheduler import IterationScheduler
from engine.kv.prefix_search import MIN_COMMON
from engine.request import Abort, RequestSpec
from tests.engine.control.test_scheduler import GREEDY, make, run_iteration, spec


def tokens_per_iteration(scheduler: IterationScheduler) -> list[int]:
    counts = []
    while scheduler.pool:
        counts.append(sum(tokens for _, tokens in run_iteration(scheduler)))
    return counts


def test_choices_of_one_prompt_compute_it_once() -> None:
    """The first computes 129 tokens; the others share 128 of them as soon as they are computed."""
    scheduler = make(
        block_size=4, max_batch_size=8, max_batch_tokens=512, reuses_prefixes=True, num_blocks=200
    )
    for _ in range(8):
        scheduler.add(spec(129, 2), 0.0)
    assert tokens_per_iteration(scheduler) == [129, 1 + 7, 7]


def test_a_chunked_prompt_is_computed_once_by_requests_that_share_it() -> None:
    scheduler = make(block_size=4, max_batch_tokens=16, reuses_prefixes=True, num_blocks=200)
    for _ in range(3):
        scheduler.add(spec(121, 1), 0.0)
    assert sum(tokens_per_iteration(scheduler)) < 121 + 2 * MIN_COMMON


@pytest.mark.parametrize("length", [10, 65])
def test_short_prompts_are_computed_twice_rather_than_waited_for(length: int) -> None:
    scheduler = make(block_size=4, max_batch_tokens=200, reuses_prefixes=True)
    for _ in range(2):
        scheduler.add(spec(length, 1), 0.0)
    assert len(tokens_per_iteration(scheduler)) == (1 if length < 64 else 2)


@pytest.mark.parametrize(
    ("length", "counts"), [(3, [24]), (4, [4 * 8]), (5, [5, 7]), (9, [9, 7]), (12, [12, 4 * 7])]
)
def test_choices_of_one_response_compute_each_full_block_once(
    length: int, counts: list[int]
) -> None:
    """Blocks have 4 tokens. The last token is computed by each choice, to sample the next one."""
    scheduler = make(
        block_size=4, max_batch_size=8, max_batch_tokens=512, reuses_prefixes=True, num_blocks=200
    )
    one = spec(length, 1)
    for _ in range(8):
        scheduler.add(replace(one), 0.0)
    assert tokens_per_iteration(scheduler) == counts


def test_a_request_does_not_wait_for_a_short_common_prefix() -> None:
    scheduler = make(block_size=4, max_batch_tokens=200, reuses_prefixes=True)
    for own in (1, 2):
        scheduler.add(RequestSpec((7,) * 8 + (own,) * 80, 1, GREEDY), 0.0)
    assert tokens_per_iteration(scheduler) == [176]


def test_a_request_does_not_wait_for_a_prompt_whose_computation_was_cancelled() -> None:
    scheduler = make(block_size=4, max_batch_tokens=16, reuses_prefixes=True)
    first, second = scheduler.add(spec(121, 1), 0.0), scheduler.add(spec(121, 1), 0.0)
    assert run_iteration(scheduler) == [(0, 16)]
    scheduler.cancel(first, Abort.CLIENT_GONE, 0.0)
    assert run_iteration(scheduler) == [(1, 16)]
    assert second.num_cached == 16


def test_a_prompt_is_hashed_only_as_far_as_its_prefix_is_cached() -> None:
    scheduler = make(num_blocks=400, block_size=4, max_batch_tokens=16, reuses_prefixes=True)
    request = scheduler.add(spec(900, 1), 0.0)
    assert len(request.block_hashes) == 0
    run_iteration(scheduler)
    assert len(request.block_hashes) <= 5


def test_a_long_cached_prefix_is_hashed_in_several_plans_beside_other_requests() -> None:
    scheduler = make(
        num_blocks=9000,
        block_size=1,
        max_batch_tokens=4096,
        reuses_prefixes=True,
        max_model_len=9999,
    )
    scheduler.add(spec(1400, 1), 0.0)
    while scheduler.pool:
        run_iteration(scheduler)
    scheduler.add(RequestSpec((1,), 50, GREEDY), 0.0)
    again = scheduler.add(spec(1400, 1), 0.0)
    assert [run_iteration(scheduler) for _ in range(3)] == [[(1, 1)], [(1, 1)], [(1, 1), (2, 1)]]
    assert again.num_cached == 1399


def test_a_long_cached_prefix_is_hashed_at_once_if_nothing_else_can_run() -> None:
    scheduler = make(
        num_blocks=9000,
        block_size=1,
        max_batch_tokens=4096,
        reuses_prefixes=True,
        max_model_len=9999,
    )
    for _ in range(2):
        scheduler.add(spec(1400, 1), 0.0)
        while scheduler.pool:
            computed = run_iteration(scheduler)
    assert computed == [(1, 1)]
