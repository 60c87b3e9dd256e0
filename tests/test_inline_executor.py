"""Behaviour specific to `InlineExecutor`; the contract suite covers the rest."""

import pytest

from engine.errors import StepFailed, WorkerLost
from tests.engine.transport.workers import REPORT, Command, EchoWorker
from tests.fakes import a_step
from tests.inline_executor import InlineExecutor


async def test_the_error_of_a_step_is_kept_as_the_cause() -> None:
    executor = InlineExecutor(EchoWorker(REPORT))
    with pytest.raises(StepFailed, match="ValueError: a step") as caught:
        await executor.submit(a_step(1, Command.RAISE))
    assert isinstance(caught.value.__cause__, ValueError)


async def test_close_fails_the_steps_in_flight_and_all_later_ones() -> None:
    executor = InlineExecutor(EchoWorker(REPORT))
    in_flight = executor.submit(a_step(1, 10))
    await executor.close()
    for answer in (in_flight, executor.submit(a_step(2, 20))):
        with pytest.raises(WorkerLost, match="closed"):
            await answer
