"""Worker processes that echo tokens, started and closed around a test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.errors import WorkerLost
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.worker_settings import WorkerSettings
from tests.engine.transport.workers import Command
from tests.fakes import a_step

ECHO = MultiprocessSettings(
    depth=2, worker="tests.engine.transport.workers:EchoWorker", restart_pause=0.0
)


def no_progress(what: str, done: int, total: int) -> None:
    """Ignores the progress."""


@asynccontextmanager
async def started(
    settings: MultiprocessSettings = ECHO, model: str = "echo"
) -> AsyncIterator[MultiprocessExecutor]:
    executor = MultiprocessExecutor(WorkerSettings(model=model), settings)
    await executor.start(no_progress)
    try:
        yield executor
    finally:
        await executor.close()


async def crash(executor: MultiprocessExecutor) -> None:
    """Let the worker die in its next step."""
    with pytest.raises(WorkerLost):
        await executor.submit(a_step(1, Command.LOSE))
