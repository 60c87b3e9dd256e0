import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.errors import StartupError, WorkerLost
from engine.lora import LoraReport, LoraSpec
from engine.transport.multiprocess import MultiprocessExecutor
from engine.worker_settings import WorkerSettings
from tests.engine.transport.echo_workers import ECHO, no_progress
from tests.engine.transport.workers import Command
from tests.fakes import a_step


@asynccontextmanager
async def started(*paths: str, num_stages: int = 1) -> AsyncIterator[MultiprocessExecutor]:
    """An executor whose workers have adapters of these paths, with the ids 1, 2, …"""
    loras = tuple(LoraSpec(i, path, path) for i, path in enumerate(paths, 1))
    settings = replace(ECHO, num_stages=num_stages, depth=num_stages)
    executor = MultiprocessExecutor(WorkerSettings(model="echo", loras=loras), settings)
    try:
        await executor.start(no_progress)
        yield executor
    finally:
        await executor.close()


async def loaded(executor: MultiprocessExecutor) -> int:
    """The sum of 10 ** id over the adapters that the worker has."""
    result = await executor.submit(a_step(1, Command.LORAS))
    return result.tokens[0]


async def restart(executor: MultiprocessExecutor) -> None:
    os.kill(executor.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await executor.submit(a_step(2, Command.HANG))
    await executor.restart()


async def test_adapters_are_loaded_with_the_model_and_while_serving() -> None:
    async with started("a") as executor:
        assert await loaded(executor) == 10
        report = await executor.load_lora(LoraSpec(2, "b", "b"))
        assert report == LoraReport(2, digest="b", num_bytes=5)
        assert await loaded(executor) == 110
        executor.unload_lora(1)
        await executor.load_lora(LoraSpec(3, "c", "c"))  # in the same thread as the unload
        assert await loaded(executor) == 1100


async def test_an_adapter_that_cannot_be_loaded_fails_the_start() -> None:
    with pytest.raises(StartupError, match="bad cannot be loaded"):
        async with started("a", "bad"):
            pass


@pytest.mark.parametrize("path", ["bad", "raise"])
async def test_an_adapter_that_cannot_be_loaded_is_reported(path: str) -> None:
    async with started() as executor:
        report = await executor.load_lora(LoraSpec(1, "it", path))
        expected = "bad cannot be loaded" if path == "bad" else "ValueError: no adapter"
        assert report == LoraReport(1, error=expected)
        assert await loaded(executor) == 0


async def test_restarted_workers_load_their_adapters_again() -> None:
    lost: list[LoraReport] = []
    async with started("a", "gone later") as executor:
        executor.watch_loras(lost.append)
        await executor.load_lora(LoraSpec(3, "c", "c"))
        executor.unload_lora(1)
        await restart(executor)
        assert await loaded(executor) == 1000
        assert lost == [LoraReport(2, error="gone later cannot be loaded")]
        await restart(executor)
        assert len(lost) == 1


async def test_a_load_ends_when_the_worker_is_lost() -> None:
    async with started() as executor:
        loading = asyncio.create_task(executor.load_lora(LoraSpec(1, "it", "hang")))
        await asyncio.sleep(0)
        await restart(executor)
        with pytest.raises(WorkerLost):
            await loading
        assert await loaded(executor) == 0


async def test_all_workers_of_a_model_load_an_adapter() -> None:
    async with started("a", num_stages=2) as executor:
        report = await executor.load_lora(LoraSpec(2, "b", "b"))
        assert report.num_bytes == 10
        assert (await executor.load_lora(LoraSpec(3, "c", "bad"))).error


async def test_an_adapter_that_one_worker_cannot_load_is_freed_by_the_others() -> None:
    async with started("a", num_stages=2) as executor:
        report = await executor.load_lora(LoraSpec(2, "it", "first fails"))
        assert report.error == "the first stage fails"
        await executor.load_lora(LoraSpec(3, "c", "c"))  # in the same thread as the unload
        assert await loaded(executor) == 1010
