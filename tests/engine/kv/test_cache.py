from array import array
from collections.abc import Callable
from typing import Any

import pytest

from engine.control.admission import SwapMode
from engine.control.scheduler import IterationScheduler
from engine.errors import StepFailed, Unavailable
from engine.iteration import Iteration
from engine.policy import Policy, build
from engine.request import Abort, Request, State
from engine.step import BlockMove, Direction, StepResult
from tests.scheduling import HAND_COST, a_scheduler, a_spec, run_iteration


def make(num_blocks: int = 8, num_host_blocks: int = 8, **bounds: object) -> IterationScheduler:
    """Two seats, blocks of one slot; the request that arrived last is preempted."""
    values: dict[str, Any] = {"max_batch_size": 2, "swap": SwapMode.REACTIVE} | bounds
    return a_scheduler(fcfs(), num_blocks, num_host_blocks, **values)


def fcfs() -> Policy:
    return build("fcfs", HAND_COST)


def planned(scheduler: IterationScheduler) -> Iteration:
    iteration = scheduler.plan(0.0)
    assert iteration is not None
    scheduler.ledger.check()
    return iteration


def commit(scheduler: IterationScheduler, iteration: Iteration) -> None:
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    scheduler.commit(iteration, StepResult(iteration.step.step_id, (5,) * samples, 0.1), 0.0)
    scheduler.ledger.check()
    scheduler.pool.check()


def until(scheduler: IterationScheduler, is_reached: Callable[[Iteration], bool]) -> Iteration:
    """Serve until a planned iteration, still in flight, is what the test waits for."""
    while not is_reached(iteration := planned(scheduler)):
        commit(scheduler, iteration)
    return iteration


def blocks(move: BlockMove) -> tuple[list[int], list[int]]:
    return list(array("i", move.device)), list(array("i", move.host))


def test_the_last_request_is_swapped_out_when_blocks_are_short_and_in_when_it_fits() -> None:
    scheduler = make()
    old, young = scheduler.add(a_spec(2, 6), 0.0), scheduler.add(a_spec(2, 6), 0.0)
    out = until(scheduler, lambda iteration: bool(iteration.step.moves))
    (move,) = out.step.moves
    assert (move.direction, move.is_awaited, move.num_blocks) == (Direction.OUT, True, 4)
    assert (young.state, young.num_computed) == (State.SWAPPING_OUT, 4)
    assert (out.requests, out.swapping) == ((old,), (young,))
    assert (scheduler.ledger.num_held, scheduler.ledger.blocks.host.num_moving) == (5, 4)
    commit(scheduler, out)
    assert young.state is State.SWAPPED
    assert scheduler.ledger.blocks.host.num_held == 4
    back = until(scheduler, lambda iteration: bool(iteration.step.moves))
    (move_in,) = back.step.moves
    assert (move_in.direction, move_in.is_awaited) == (Direction.IN, True)
    assert blocks(move_in)[1] == blocks(move)[1]
    assert back.requests == (young,)
    assert [(entry.start, len(entry.tokens)) for entry in back.step.entries] == [(4, 1)]
    assert scheduler.ledger.blocks.host.num_moving == 4
    commit(scheduler, back)
    assert scheduler.ledger.blocks.host.num_free == 8
    while scheduler.pool:
        commit(scheduler, planned(scheduler))
    assert (young.setbacks.num_swaps, young.setbacks.num_preemptions, old.setbacks.num_swaps) == (
        1,
        0,
        0,
    )


def test_if_the_host_tier_is_full_the_victim_is_recomputed() -> None:
    scheduler = make(num_host_blocks=3)
    scheduler.add(a_spec(2, 6), 0.0)
    young = scheduler.add(a_spec(2, 6), 0.0)
    while scheduler.pool:
        run_iteration(scheduler, 0.0)
    assert (young.setbacks.num_swaps, young.setbacks.num_preemptions) == (0, 1)


def test_published_blocks_stay_cached_on_the_device_and_are_not_swapped_in() -> None:
    scheduler = make(num_blocks=9, reuses_prefixes=True)
    scheduler.add(a_spec(2, 6, salt="old"), 0.0)
    scheduler.add(a_spec(2, 6, salt="young"), 0.0)
    out = until(scheduler, lambda iteration: bool(iteration.step.moves))
    commit(scheduler, out)
    back = until(scheduler, lambda iteration: bool(iteration.step.moves))
    moved_out, moved_in = out.step.moves[0].num_blocks, back.step.moves[0].num_blocks
    assert 0 < moved_in < moved_out
    assert scheduler.ledger.blocks.host.num_free == 8 - moved_in
    commit(scheduler, back)
    assert scheduler.ledger.blocks.host.num_free == 8


def swapping_out() -> tuple[IterationScheduler, Request, Iteration | None]:
    scheduler = make()
    scheduler.add(a_spec(2, 6), 0.0)
    young = scheduler.add(a_spec(2, 6, deadline=5.0), 0.0)
    return scheduler, young, until(scheduler, lambda iteration: bool(iteration.step.moves))


def swapped() -> tuple[IterationScheduler, Request, Iteration | None]:
    scheduler, young, out = swapping_out()
    assert out is not None
    commit(scheduler, out)
    return scheduler, young, None


def swapping_in() -> tuple[IterationScheduler, Request, Iteration | None]:
    scheduler, young, _ = swapped()
    while scheduler.admission.missing(young).blocks > 0:
        commit(scheduler, planned(scheduler))
    scheduler.add(a_spec(1, 3), 0.0)
    scheduler.admission.start(young, 0.0, is_awaited=False)
    return scheduler, young, planned(scheduler)


def fetched() -> tuple[IterationScheduler, Request, Iteration | None]:
    """Swapped in by the iteration that computes it."""
    scheduler, young, _ = swapped()
    return scheduler, young, until(scheduler, lambda iteration: bool(iteration.step.moves))


PLACES = {
    State.SWAPPING_OUT: swapping_out,
    State.SWAPPED: swapped,
    State.SWAPPING_IN: swapping_in,
    State.RUNNING: fetched,
}
in_every_place = pytest.mark.parametrize("place", PLACES)


def settled(scheduler: IterationScheduler, in_flight: Iteration | None) -> None:
    """The iteration returns and all requests are served; then both tiers are free."""
    if in_flight is not None:
        commit(scheduler, in_flight)
    while scheduler.pool:
        commit(scheduler, planned(scheduler))
    ledger = scheduler.ledger
    assert (ledger.num_held, ledger.num_moving, ledger.num_leaked(())) == (0, 0, 0)
    assert ledger.blocks.host.num_free == ledger.blocks.host.num_pages


@in_every_place
def test_a_cancelled_request_is_freed_from_both_tiers_at_the_commit(place: State) -> None:
    scheduler, young, in_flight = PLACES[place]()
    assert young.state is place
    scheduler.cancel(young, Abort.CLIENT_GONE, 1.0)
    scheduler.ledger.check()
    is_touched = place is not State.SWAPPED
    assert young.state is (State.LEAVING if is_touched else State.CANCELLED)
    if in_flight is not None:
        commit(scheduler, in_flight)
    assert young.state is State.CANCELLED
    assert scheduler.ledger.blocks.host.num_free == 8
    settled(scheduler, None)


@in_every_place
def test_a_request_expires_in_whichever_tier_its_kv_is(place: State) -> None:
    scheduler, young, in_flight = PLACES[place]()
    assert scheduler.expire(5.0) == [young]
    settled(scheduler, in_flight)
    assert young.state is State.EXPIRED


@in_every_place
def test_a_worker_crash_clears_both_tiers(place: State) -> None:
    scheduler, young, in_flight = PLACES[place]()
    scheduler.lose_device([in_flight] if in_flight else [], 1.0)
    scheduler.ledger.check()
    assert (young.state, young.num_computed) == (State.WAITING, 0)
    settled(scheduler, None)
    assert young.state is State.FINISHED
    assert young.produced == 6


@in_every_place
def test_a_worker_that_dies_under_a_cancelled_request_ends_it(place: State) -> None:
    scheduler, young, in_flight = PLACES[place]()
    scheduler.cancel(young, Abort.CLIENT_GONE, 1.0)
    scheduler.lose_device([in_flight] if in_flight else [], 1.0)
    assert young.state is State.CANCELLED
    settled(scheduler, None)


@pytest.mark.parametrize("place", [State.SWAPPING_OUT, State.SWAPPING_IN])
def test_a_request_whose_move_failed_with_its_step_is_recomputed(place: State) -> None:
    scheduler, young, in_flight = PLACES[place]()
    assert in_flight is not None
    failed = scheduler.fail(in_flight, StepFailed("boom"), 1.0)
    scheduler.ledger.check()
    assert young not in failed
    assert (young.state, young.num_computed) == (State.WAITING, 0)
    settled(scheduler, None)
    assert young.produced == 6


def test_a_request_swapped_in_by_its_own_step_fails_with_that_step() -> None:
    scheduler, young, in_flight = fetched()
    assert in_flight is not None
    assert young in scheduler.fail(in_flight, StepFailed("boom"), 1.0)
    settled(scheduler, None)


@in_every_place
def test_failing_all_requests_frees_all_blocks(place: State) -> None:
    scheduler, young, in_flight = PLACES[place]()
    scheduler.fail_all(Unavailable("over"), 1.0)
    settled(scheduler, in_flight)
    assert young.state.is_terminal


@in_every_place
@pytest.mark.parametrize("name", ["mlfq", "fair", "deadline"])
def test_policies_are_switched_in_every_state_of_a_swap(place: State, name: str) -> None:
    scheduler, young, in_flight = PLACES[place]()
    scheduler.switch(build(name, HAND_COST), 1.0)
    settled(scheduler, in_flight)
    assert young.state is State.FINISHED
