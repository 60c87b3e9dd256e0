from array import array
from sys import maxsize

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import ContextTooLong
from engine.kv.layer_groups import LayerGroups
from engine.kv.ledger import KVLedger
from engine.kv.prefix import name_in_group
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Caching, Request, RequestSpec
from engine.step import RequestId, StepEntry, StepResult
from tests.scheduling import GREEDY, planned

A = RequestId(1)
CHUNK = 8  # tokens per iteration
SIZE = 2


def make(*windows: int | None, num_blocks: int = 400, host_blocks: int = 0) -> IterationScheduler:
    settings = SchedulerSettings(max_model_len=1000, max_batch_size=4, max_batch_tokens=CHUNK)
    ledger = KVLedger(KVShape(num_blocks, SIZE, host_blocks, windows=windows, chunk=CHUNK))
    return IterationScheduler(settings, ledger, FirstComeFirstServed())


def spec(prompt: range | tuple[int, ...], max_tokens: int) -> RequestSpec:
    return RequestSpec(tuple(prompt), max_tokens, GREEDY)


def run_iteration(scheduler: IterationScheduler) -> tuple[StepEntry, ...]:
    iteration = planned(scheduler)
    entries = iteration.step.entries
    samples = sum(entry.sample is not None for entry in entries)
    scheduler.commit(iteration, StepResult(iteration.step.step_id, (5,) * samples, 0.01), 0.0)
    scheduler.ledger.check()
    return entries


def serve(scheduler: IterationScheduler, *specs: RequestSpec) -> tuple[list[Request], int]:
    """Serve requests one after the other; returns them, and the most blocks held at once."""
    requests, most = [], 0
    for each in specs:
        requests.append(scheduler.add(each, 0.0))
        while scheduler.pool:
            run_iteration(scheduler)
            most = max(most, scheduler.ledger.num_held)
    return requests, most


def test_a_window_bounds_the_blocks_of_a_long_request() -> None:
    _, whole = serve(make(None), spec(range(300), 200))
    _, windowed = serve(make(6), spec(range(300), 200))
    assert whole >= 249
    assert windowed <= (6 + CHUNK) // SIZE + 1


def test_only_the_layers_with_a_window_give_blocks_back() -> None:
    _, most = serve(make(None, 6), spec(range(300), 200))
    assert 249 < most <= 250 + (6 + CHUNK) // SIZE + 1


def test_a_step_names_the_blocks_from_the_first_window_on() -> None:
    scheduler = make(None, 6)
    scheduler.add(spec(range(30), 4), 0.0)
    for _ in range(3):
        (entry,) = run_iteration(scheduler)
    full, window = entry.tables
    assert entry.start == 16
    assert entry.blocks == b""
    assert full.first == 0
    assert window.first == 5  # position 11 is the first that position 16 reads; 10 may be, later
    assert len(array("i", window.blocks)) == 12 - window.first


def test_a_chat_that_continues_reuses_all_of_its_last_turn() -> None:
    for windows in ((None,), (6,), (None, 6), (None, 6, 6, 3)):
        scheduler = make(*windows)
        prompt: tuple[int, ...] = tuple(range(21))
        for turn in range(8):
            (request,), _ = serve(scheduler, spec(prompt, 10))
            if turn:
                assert request.num_cached == (len(prompt) - 4) // SIZE * SIZE, windows
            prompt = (*request.tokens(0, request.num_tokens), 7, 7, 7)


def test_without_the_last_window_a_shorter_prefix_is_reused() -> None:
    groups = LayerGroups.of((None, 6), SIZE)
    hashes = [bytes((number,)) * 16 for number in range(20)]
    published = {name_in_group(one, group) for one in hashes for group in range(2)}
    assert groups.num_reusable(hashes, 20, published) == 20
    published.remove(name_in_group(hashes[18], 1))  # positions 36 and 37
    assert groups.num_reusable(hashes, 20, published) == 18
    published.remove(name_in_group(hashes[16], 1))
    assert groups.num_reusable(hashes, 20, published) == 16
    assert groups.num_reusable(hashes, 5, published) == 5
    published.remove(name_in_group(hashes[15], 1))
    published.remove(name_in_group(hashes[3], 1))
    assert groups.num_reusable(hashes, 16, published) == 15
    assert groups.num_reusable(hashes, 6, published) == 3


def test_prompts_with_a_common_beginning_share_it_behind_a_window() -> None:
    scheduler = make(None, 6)
    serve(scheduler, spec((*range(40), *range(500, 560)), 4))
    (second,), _ = serve(scheduler, spec((*range(40), *range(700, 720)), 4))
    assert second.num_cached == 40


def test_blocks_that_were_given_back_are_evicted_first() -> None:
    scheduler = make(6, num_blocks=20)
    serve(scheduler, spec(range(8), 1))  # four blocks, least recently used
    serve(scheduler, spec(range(100, 130), 1))  # 15 blocks, of which eight are given back
    assert scheduler.ledger.num_cached > 15
    serve(scheduler, spec(range(200, 214), 1))  # seven blocks
    (first,), _ = serve(scheduler, spec(range(8), 1))
    assert first.num_cached == 6


def test_the_window_before_a_checkpoint_is_not_evicted_before_other_blocks() -> None:
    for checkpoints in ((), (21,)):
        scheduler = make(6, num_blocks=20)
        marked = RequestSpec(tuple(range(40)), 1, GREEDY, caching=Caching(checkpoints=checkpoints))
        serve(scheduler, marked)
        serve(scheduler, spec(range(200, 230), 1))  # evicts some of the 20 blocks that were cached
        (other,), _ = serve(scheduler, spec((*range(20), *range(700, 708)), 1))
        assert (other.num_cached == 20) == bool(checkpoints)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "longest"),
    [
        ((None,), 10, 20),
        ((None, None), 10, 10),
        ((6,), 10, maxsize),
        ((6,), 7, 14),
        ((None, 6), 10, 10),
        ((None, 6), 30, 44),
        ((None, 6, 2), 40, 52),
    ],
)
def test_the_longest_request_that_fits_alone(
    windows: tuple[int | None, ...], num_blocks: int, longest: int
) -> None:
    ledger = KVLedger(KVShape(num_blocks, SIZE, windows=windows, chunk=CHUNK))
    scheduler = IterationScheduler(SchedulerSettings(64), ledger, FirstComeFirstServed())
    assert scheduler.kv.longest_request == longest
    if longest < maxsize:
        assert ledger.reserve(A, longest)
        assert not ledger.reserve(RequestId(2), 2 * SIZE * num_blocks)


def test_a_request_that_never_fits_is_rejected_with_the_size_of_the_cache() -> None:
    scheduler = make(None, 6, num_blocks=30)
    scheduler.arrivals.check_fits(40, 5)
    with pytest.raises(ContextTooLong, match="44"):
        scheduler.arrivals.check_fits(40, 6)


def test_names_of_different_groups_differ() -> None:
    names = {name_in_group(b"0123456789abcdef", group) for group in range(40)}
    assert len(names) == 40


def test_a_model_with_one_full_group_keeps_all() -> None:
    assert LayerGroups.of((None,), 16).keeps_all
    assert not LayerGroups.of((None, None), 16).keeps_all
    assert not LayerGroups.of((4096,), 16).keeps_all
