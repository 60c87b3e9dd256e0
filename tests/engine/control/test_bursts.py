import asyncio

import pytest

from engine.loop import GATHER_TURNS, Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from tests.scheduling import HAND_COST, a_scheduler, a_spec


async def ends_of_two(num_turns: int) -> list[float]:
    """When two requests of two prompt tokens end, whose arrivals are `num_turns` turns apart."""
    clock = asyncio.get_running_loop().time
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=2)
    engine = Engine(scheduler, SimulatedExecutor(HAND_COST), clock)
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(1)
    ends = []
    with engine.stream(a_spec(2, 1)) as first:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        with engine.stream(a_spec(2, 1)) as second:
            for stream in (first, second):
                while (await stream.next()).finish is None:
                    pass
                ends.append(clock() - 1.0)
    running.cancel()
    return ends


@pytest.mark.parametrize("num_turns", [0, 1, GATHER_TURNS - 1])
def test_requests_that_arrive_within_some_turns_share_the_first_iteration(num_turns: int) -> None:
    assert run_virtual(ends_of_two(num_turns)) == [2.5, 2.5]


def test_an_idle_engine_starts_without_waiting_for_later_arrivals() -> None:
    assert run_virtual(ends_of_two(100)) == [1.5, 3.0]
