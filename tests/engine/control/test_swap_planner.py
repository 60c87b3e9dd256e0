from typing import Any

import pytest

from engine.control.admission import SwapMode
from engine.control.scheduler import IterationScheduler
from engine.iteration import Iteration
from engine.policy import PolicySettings, build
from engine.request import State
from engine.step import Direction, StepResult
from tests.scheduling import HAND_COST, a_scheduler, a_spec, planned


def make(policy: str = "mlfq", num_blocks: int = 50, **bounds: object) -> IterationScheduler:
    """One seat, blocks of one slot; the first quantum is that of one decode, a second."""
    values: dict[str, Any] = {"max_batch_tokens": 32, "swap": SwapMode.PROACTIVE} | bounds
    return a_scheduler(
        build(policy, HAND_COST, PolicySettings(1000.0, seats=1)), num_blocks, 50, **values
    )


def run_iteration(scheduler: IterationScheduler, now: float = 0.0) -> Iteration:
    iteration = planned(scheduler, now)
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    seconds = HAND_COST.step(iteration.step)
    scheduler.commit(iteration, StepResult(iteration.step.step_id, (5,) * samples, seconds), now)
    scheduler.ledger.check()
    return iteration


def crowd(scheduler: IterationScheduler) -> tuple[int, int]:
    """A long request that was demoted, and a new one; their ids."""
    long = scheduler.add(a_spec(20, 30), 0.0)
    for _ in range(8):
        run_iteration(scheduler)
    short = scheduler.add(a_spec(12, 3), 0.0)
    return long.request_id, short.request_id


def test_the_request_that_runs_last_is_swapped_out_before_its_blocks_are_needed() -> None:
    scheduler = make()
    long, short = crowd(scheduler)
    assert scheduler.ledger.num_free == 50 - 27
    step = run_iteration(scheduler).step
    assert [entry.request_id for entry in step.entries] == [short]
    (move,) = step.moves
    assert (move.direction, move.is_awaited, move.num_blocks) == (Direction.OUT, False, 27)
    (sunk,) = [request for request in scheduler.pool if request.request_id == long]
    assert sunk.state is State.SWAPPED
    assert scheduler.ledger.num_free == 50 - 12


def test_a_request_that_runs_soon_is_swapped_in_before_it_is_scheduled() -> None:
    scheduler = make()
    long, _ = crowd(scheduler)
    while len(scheduler.pool) > 1:
        step = run_iteration(scheduler).step
        assert all(entry.request_id != long for entry in step.entries)
    scheduler.add(a_spec(1, 1), 0.0)
    step = run_iteration(scheduler).step
    assert [entry.request_id for entry in step.entries] != [long]
    (move,) = step.moves
    assert (move.direction, move.is_awaited, move.num_blocks) == (Direction.IN, False, 27)
    step = run_iteration(scheduler).step
    assert [entry.request_id for entry in step.entries] == [long]
    assert step.moves == ()


@pytest.mark.parametrize(
    ("policy", "bounds"),
    [("fcfs", {}), ("mlfq", {"swap": SwapMode.REACTIVE}), ("mlfq", {"max_preemptions": 0})],
)
def test_kv_is_swapped_early_only_if_policy_setting_and_bound_allow_it(
    policy: str, bounds: dict[str, object]
) -> None:
    scheduler = make(policy, 50, **bounds)
    crowd(scheduler)
    while scheduler.pool:
        assert run_iteration(scheduler).step.moves == ()


def test_blocks_that_are_about_to_be_freed_are_not_swapped_out_twice() -> None:
    scheduler = make()
    crowd(scheduler)
    first = scheduler.plan(0.0)
    second = scheduler.plan(0.0)
    assert first is not None
    assert len(first.step.moves) == 1
    assert second is None
    assert scheduler.kv.room.blocks_coming == 27
    scheduler.commit(first, StepResult(first.step.step_id, (5,), 1.0), 0.0)
    assert scheduler.kv.room.blocks_coming == 0
