from random import Random

import pytest

from engine.control.admission import SwapMode
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.kv.ledger import KVLedger
from engine.kv.pages import Pages
from engine.kv.request_states import SNAPSHOT_TOKENS, RequestStates, RowsOfDrafts
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Caching, Request, RequestSpec, State, Times
from engine.step import (
    NO_STATE,
    Direction,
    PageKind,
    RequestId,
    StateSlots,
    Step,
    StepEntry,
    StepResult,
)
from tests.scheduling import GREEDY, planned

A, B, C = RequestId(1), RequestId(2), RequestId(3)
SIZE = 4
HASHES = [bytes((number,)) * 16 for number in range(8)]


def make(num_states: int = 12, num_blocks: int = 400) -> IterationScheduler:
    settings = SchedulerSettings(max_model_len=4000, max_batch_size=4, max_batch_tokens=64)
    ledger = KVLedger(KVShape(num_blocks, SIZE, num_states=num_states))
    return IterationScheduler(settings, ledger, FirstComeFirstServed())


def states(scheduler: IterationScheduler) -> RequestStates:
    return scheduler.ledger.states


def slots(count: int) -> RequestStates:
    """So many state slots, which no request has."""
    shape = KVShape(1, SIZE, num_states=count)
    return RequestStates(Pages(PageKind.SNAPSHOT, shape), group=0)


def spec(prompt: range | tuple[int, ...], max_tokens: int) -> RequestSpec:
    return RequestSpec(tuple(prompt), max_tokens, GREEDY)


def run_iteration(
    scheduler: IterationScheduler, late: tuple[int, ...] = ()
) -> tuple[StepEntry, ...]:
    return run_step(scheduler, late).entries


def run_step(scheduler: IterationScheduler, late: tuple[int, ...] = ()) -> Step:
    iteration = planned(scheduler)
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, (5,) * samples, 0.01, late=late)
    scheduler.commit(iteration, result, 0.0)
    scheduler.ledger.check()
    return iteration.step


def serve(scheduler: IterationScheduler, one: RequestSpec) -> tuple[Request, int]:
    """Serve a request; returns it, and the number of tokens that were computed for it."""
    request, computed = scheduler.add(one, 0.0), 0
    while scheduler.pool:
        computed += sum(len(entry.tokens) for entry in run_iteration(scheduler))
    return request, computed


def test_a_request_reads_zeros_first_and_then_its_own_slot() -> None:
    scheduler = make()
    scheduler.add(spec(range(70), 3), 0.0)
    first, second, third = (run_iteration(scheduler)[0].state for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.source == NO_STATE
    assert first.snapshots == ()
    assert second.source == second.slot == third.slot == first.slot
    assert [num_tokens for num_tokens, _ in second.snapshots] == [4]  # after 68 of 70 tokens


def test_turns_of_a_chat_compute_only_what_is_new() -> None:
    scheduler = make()
    prompt: tuple[int, ...] = tuple(range(50))
    for turn in range(8):
        request, computed = serve(scheduler, spec(prompt, 21))
        if turn:
            known = len(prompt) - 8  # all but the new message, and the answer's last token
            assert request.num_cached == known // SIZE * SIZE
            assert computed <= 7 + SIZE + 1 + 21
        prompt = (*request.tokens(0, request.num_tokens), *range(500, 507))


@pytest.mark.parametrize(
    ("shared", "reused"),
    [(1024, 1024), (1500, 1024), (1023, 0), (2060, 2048), (2996, 2996), (100, 0)],
)
def test_a_shared_beginning_is_reused_up_to_the_snapshot_before_its_end(
    shared: int, reused: int
) -> None:
    assert SNAPSHOT_TOKENS == 1024
    scheduler = make(num_states=40, num_blocks=3000)
    serve(scheduler, spec(range(3000), 2))
    other = spec((*range(shared), *range(5000, 5000 + 3000 - shared)), 2)
    request, _ = serve(scheduler, other)
    assert request.num_cached == reused


def test_the_same_prompt_computes_its_last_block_again() -> None:
    scheduler = make()
    serve(scheduler, spec(range(50), 6))
    again, _ = serve(scheduler, spec(range(50), 6))
    assert again.num_cached == 48


def test_a_prompt_shifted_by_tokens_at_its_beginning_reuses_nothing() -> None:
    scheduler = make()
    serve(scheduler, spec(range(200), 6))
    shifted, _ = serve(scheduler, spec((*range(900, 1000), *range(200)), 6))
    assert shifted.num_cached == 0


def test_of_the_output_only_the_newest_snapshot_is_kept() -> None:
    scheduler = make()
    serve(scheduler, spec(range(50), 41))
    assert states(scheduler).pool.num_cached == 2  # of the prompt and of the output


def test_a_prompt_goes_on_behind_a_checkpoint() -> None:
    scheduler = make(num_states=40)
    marked = RequestSpec(tuple(range(300)), 2, GREEDY, caching=Caching(checkpoints=(102, 203)))
    serve(scheduler, marked)
    for shared, reused in ((250, 200), (180, 100), (90, 0)):
        tail = range(5000 + shared, 5030 + shared)
        other, _ = serve(scheduler, spec((*range(shared), *tail), 2))
        assert other.num_cached == reused


def test_nothing_behind_the_last_checkpoint_is_left_to_others_if_the_request_says_so() -> None:
    scheduler = make()
    explicit = RequestSpec(tuple(range(300)), 9, GREEDY, caching=Caching(102, checkpoints=(102,)))
    request, _ = serve(scheduler, explicit)
    assert states(scheduler).pool.num_cached == 1
    assert scheduler.ledger.num_cached == 100 // SIZE
    again, _ = serve(scheduler, spec((*request.tokens(0, request.num_tokens), 7), 2))
    assert again.num_cached == 100


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_states_of_a_turn_are_evicted_first_once_its_chat_has_gone_on(goes_on: bool) -> None:
    scheduler = make(num_states=12)
    serve(scheduler, spec(range(900, 960), 20))  # another chat, used less lately than the first
    first, _ = serve(scheduler, spec(range(50), 20))
    history = first.tokens(0, first.num_tokens)
    if goes_on:
        serve(scheduler, spec((*history, *range(500, 530)), 20))
    fork = spec((*history, *range(700, 730)), 2)
    pool = states(scheduler).pool
    held = pool.allocate(pool.num_available - pool.num_cached + 2)  # two snapshots are evicted
    for slot in held:
        pool.drop(slot)
    request, _ = serve(scheduler, fork)
    assert (request.num_cached < len(history) // SIZE * SIZE) == goes_on


def test_as_many_chats_go_on_as_there_are_states_for_their_last_turns() -> None:
    scheduler, chance = make(num_states=20, num_blocks=20_000), Random(0)
    chats = [tuple(range(1000 * n, 1000 * n + 40)) for n in range(8)]
    turns = [chat for chat in range(8) for _ in range(8)]
    chance.shuffle(turns)
    prompt_len = num_cached = 0
    for chat in turns:
        request, _ = serve(scheduler, spec(chats[chat], 12))
        prompt_len, num_cached = prompt_len + request.prompt_len, num_cached + request.num_cached
        chats[chat] = (*request.tokens(0, request.num_tokens), *chance.choices(range(9000), k=20))
    assert num_cached / prompt_len > 0.8  # 0.58 if the least recently used are evicted


def test_snapshots_of_a_long_prompt_take_a_quarter_of_the_slots() -> None:
    ledger = slots(16)
    for prompt_len, first in ((4 * SNAPSHOT_TOKENS, 1), (4 * SNAPSHOT_TOKENS + 1, 2)):
        request = Request(A, spec(range(prompt_len), 1), Times(0.0))
        ends = ledger.snapshot_ends(request, 0, prompt_len, SIZE)
        assert ends[0] == first * SNAPSHOT_TOKENS
        assert len(ends) <= 4


def test_a_snapshot_that_is_read_is_not_overwritten() -> None:
    ledger = slots(3)
    ledger.start(A, [])
    ((_, snapshot),) = ledger.plan(A, 0, [4]).snapshots
    ledger.commit(A, 4, 4, HASHES, SIZE)
    ledger.release(A)
    assert ledger.num_missing(HASHES[:1]) <= 0
    ledger.start(B, HASHES[:1])
    ledger.start(C, [])
    assert ledger.num_missing([]) == 1
    planned = ledger.plan(B, 4, [8])
    assert planned.source == snapshot
    assert planned.snapshots == ()  # no slot is left
    ledger.commit(B, 8, 4, HASHES, SIZE)
    assert ledger.num_missing([]) == 0  # the snapshot is cached again
    ledger.check({B, C})


def a_verify_step(ledger: RequestStates, start: int, num_drafts: int) -> StateSlots:
    """A decode at `start`, with slots for the states behind its drafts."""
    planned = ledger.plan(A, start, [])
    return ledger.plan_drafts(A, planned, RowsOfDrafts(start, num_drafts, has_snapshot=False))


def test_the_next_step_reads_the_state_after_the_last_accepted_row() -> None:
    ledger = slots(8)
    ledger.start(A, [])
    first = ledger.plan(A, 0, [])
    ledger.commit(A, 5, 5, HASHES, SIZE)
    planned = a_verify_step(ledger, 5, num_drafts=3)
    assert (planned.slot, planned.source) == (first.slot, first.slot)
    assert [row.num_tokens for row in planned.snapshots] == [1, 2, 3]
    ledger.commit(A, 7, 5, HASHES, SIZE)  # one draft was accepted
    ledger.check({A})
    following = ledger.plan(A, 7, [])
    assert (following.slot, following.source) == (first.slot, planned.snapshots[1].slot)
    ledger.commit(A, 8, 5, HASHES, SIZE)
    assert ledger.pool.num_available == 7
    assert ledger.plan(A, 8, []).source == first.slot


def test_with_all_drafts_accepted_the_requests_own_slot_is_read() -> None:
    ledger = slots(8)
    ledger.start(A, [])
    a_verify_step(ledger, 5, num_drafts=3)
    ledger.commit(A, 9, 5, HASHES, SIZE)
    ledger.check({A})
    assert ledger.pool.num_available == 7
    following = ledger.plan(A, 9, [])
    assert following.source == following.slot


def test_an_accepted_row_at_the_end_of_a_block_is_a_snapshot_too() -> None:
    ledger = slots(8)
    ledger.start(A, [])
    planned = a_verify_step(ledger, 5, num_drafts=4)
    ledger.commit(A, 8, 5, HASHES, SIZE)  # the third row ends a block, and its draft is rejected
    ledger.check({A})
    assert HASHES[1] in ledger.snapshots
    assert ledger.plan(A, 8, []).source == planned.snapshots[2].slot
    ledger.release(A)
    assert ledger.pool.num_cached == 1


def test_drafts_behind_a_chunk_in_flight_keep_their_slots_when_it_returns() -> None:
    ledger = slots(5)
    ledger.start(A, [])
    ledger.plan(A, 0, [4])
    planned = a_verify_step(ledger, 5, num_drafts=1)  # the chunk before has not returned
    ledger.commit(A, 5, 20, HASHES, SIZE)
    assert ledger.pool.num_available == 3  # one of them is the snapshot after 4 tokens
    ledger.commit(A, 6, 20, HASHES, SIZE)  # the draft was rejected
    ledger.check({A})
    assert ledger.plan(A, 6, []).source == planned.snapshots[0].slot


def test_a_state_is_swapped_also_if_the_model_keeps_no_kv() -> None:
    settings = SchedulerSettings(
        max_model_len=100, max_batch_size=1, max_batch_tokens=64, swap=SwapMode.REACTIVE
    )
    ledger = KVLedger(KVShape(1, SIZE, 1, windows=(), num_states=2, num_host_states=1))
    scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed())
    request = scheduler.add(spec(range(10), 4), 0.0)
    run_iteration(scheduler)
    assert scheduler.kv.swap_out(request, 0.0, is_awaited=False)
    other = scheduler.add(spec(range(10), 1), 0.0)
    (out,) = run_step(scheduler).moves
    assert (out.direction, out.kind) == (Direction.OUT, PageKind.SNAPSHOT)
    assert (request.state, other.produced) == (State.SWAPPED, 1)
    (back,) = run_step(scheduler).moves
    assert (back.direction, back.kind, back.host) == (Direction.IN, PageKind.SNAPSHOT, out.host)
    while scheduler.pool:
        run_iteration(scheduler)
    assert request.produced == 4


def test_more_requests_than_states_wait() -> None:
    scheduler = make(num_states=2)
    requests = [scheduler.add(spec(range(10), 30), 0.0) for _ in range(4)]
    run_iteration(scheduler)
    assert sum(request.state is State.WAITING for request in requests) >= 2
    while scheduler.pool:
        run_iteration(scheduler)
    assert all(request.produced == 30 for request in requests)
    assert states(scheduler).num_leaked(()) == 0


def test_a_late_row_starts_again_behind_its_newest_snapshot() -> None:
    scheduler = make()
    request = scheduler.add(spec(range(50), 4), 0.0)
    run_iteration(scheduler, late=(0,))
    assert request.state is State.WAITING
    (entry,) = run_iteration(scheduler)
    assert entry.start == 48
    assert entry.state is not None
    assert entry.state.source not in (NO_STATE, entry.state.slot)
    while scheduler.pool:
        run_iteration(scheduler)
    assert request.produced == 4


def test_a_request_that_fails_leaves_no_state_behind() -> None:
    scheduler = make()
    request = scheduler.add(spec(range(50), 4), 0.0)
    run_iteration(scheduler)
    iteration = planned(scheduler)
    scheduler.lose_device([iteration], 0.0)
    assert request.state is State.WAITING
    assert states(scheduler).pool.num_cached == 0
    scheduler.ledger.check()
