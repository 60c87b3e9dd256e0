import asyncio
from dataclasses import replace

import pytest

from engine.cost.model import CostModel
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import BlockMove, Direction
from tests.fakes import a_step

SECOND = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)
OUT, IN = Direction.OUT, Direction.IN


def move(direction: Direction, num_blocks: int, *, is_awaited: bool) -> BlockMove:
    return BlockMove(direction, bytes(4 * num_blocks), bytes(4 * num_blocks), is_awaited)


def seconds(*moves: BlockMove, depth: int = 1) -> float:
    """When the result of a one-second step with these moves arrives, at 0.25 s per block."""

    async def main() -> float:
        executor = SimulatedExecutor(SECOND, depth, block_seconds=0.25)
        await executor.submit(replace(a_step(1, 10), moves=moves))
        return asyncio.get_running_loop().time()

    return run_virtual(main())


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([], 1.0),
        ([move(OUT, 4, is_awaited=True)], 2.0),
        ([move(OUT, 4, is_awaited=True), move(IN, 6, is_awaited=True)], 2.5),
        ([move(OUT, 3, is_awaited=False)], 1.0),
        ([move(IN, 12, is_awaited=False)], 3.0),
        ([move(IN, 4, is_awaited=True), move(IN, 2, is_awaited=False)], 2.0),
        ([move(IN, 4, is_awaited=True), move(IN, 6, is_awaited=False)], 2.5),
    ],
)
def test_awaited_moves_precede_the_compute_and_other_moves_overlap_it(
    moves: list[BlockMove], expected: float
) -> None:
    assert seconds(*moves) == expected


def test_a_later_stage_moves_blocks_while_the_previous_stage_computes() -> None:
    assert seconds(move(OUT, 4, is_awaited=True), depth=2) == (1.0 + 0.5) + 0.5
    assert seconds(move(OUT, 8, is_awaited=True), depth=2) == (2.0 + 0.5) + 0.5
