import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import Unavailable, WorkerLost
from engine.transport.multiprocess import MultiprocessExecutor
from engine.worker_settings import WorkerSettings
from tests.engine.transport.echo_workers import ECHO, crash, no_progress, started
from tests.engine.transport.workers import Command
from tests.fakes import a_step

pytestmark = pytest.mark.usefixtures("no_process_or_file_descriptor_is_left")


async def test_workers_that_die_in_their_trial_step_are_restarted_a_limited_number_of_times() -> (
    None
):
    async with started(replace(ECHO, max_restarts=2), model="fails later") as executor:
        lost = asyncio.Event()
        executor.watch(lost.set)
        with pytest.raises(Unavailable, match="restarted 3 times in a row without completing a st"):
            await executor.restart()
        assert not lost.is_set()
        assert not executor.is_alive


async def test_workers_that_complete_steps_are_restarted_without_a_pause() -> None:
    async with started(replace(ECHO, restart_pause=3600.0)) as executor:
        for step_id in range(3):
            assert (await executor.submit(a_step(step_id, 20))).tokens == (21,)
            await crash(executor)
            await executor.restart()


async def test_workers_killed_while_idle_are_restarted_any_number_of_times() -> None:
    async with started(replace(ECHO, max_restarts=1)) as executor:
        for _ in range(3):
            lost = asyncio.Event()
            executor.watch(lost.set)
            os.kill(executor.pids[0], signal.SIGKILL)
            await lost.wait()
            await executor.restart()
        assert executor.is_alive


async def test_workers_killed_while_loading_are_restarted_more_often_than_crashing_ones(
    tmp_path: Path,
) -> None:
    """The `die` marker of `DigestWorker` makes it kill itself while it loads, once."""
    settings = replace(ECHO, worker="tests.survival.workers:DigestWorker", max_restarts=1, depth=1)
    executor = MultiprocessExecutor(WorkerSettings(model=str(tmp_path)), settings)
    await executor.start(no_progress)
    for _ in range(2):
        (tmp_path / "die").touch()
        await executor.restart()
    assert executor.num_restarts == 4
    await executor.close()


async def test_close_ends_the_pause_before_a_restart() -> None:
    async with started(replace(ECHO, restart_pause=3600.0)) as executor:
        await crash(executor)
        await executor.restart()
        await crash(executor)
        restart = asyncio.create_task(executor.restart())
        await asyncio.sleep(0)
        await executor.close()
        with pytest.raises(Unavailable, match="the executor was closed"):
            await restart


async def test_the_log_says_which_worker_died_of_which_signal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "engine.transport")
    async with started(replace(ECHO, num_ranks=2)) as executor:
        victim, other = executor.pids
        lost = asyncio.Event()
        executor.watch(lost.set)
        os.kill(victim, signal.SIGKILL)
        await lost.wait()
        await executor.restart()
    lines = [record.getMessage() for record in caplog.records]
    cause = "signal 9, Killed (not by the server; possibly out of memory)"
    assert f"worker {victim} was killed by {cause}" in lines
    assert f"worker {other} was killed by the server (signal 9, Killed)" in lines


async def test_the_log_does_not_blame_memory_for_a_worker_that_the_server_killed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "engine.transport")
    async with started(replace(ECHO, step_seconds=0.1)) as executor:
        (pid,) = executor.pids
        with pytest.raises(WorkerLost, match="hangs"):
            await executor.submit(a_step(1, Command.HANG))
        await executor.restart()
    lines = [record.getMessage() for record in caplog.records]
    assert f"worker {pid} was killed by the server (signal 9, Killed)" in lines
    assert not any("out of memory" in line for line in lines)


async def test_a_restart_requires_the_slots_of_the_first_start() -> None:
    settings = replace(ECHO, max_restarts=2, restart_pause=0.0)
    async with started(settings, model="shrink") as executor:
        with pytest.raises(Unavailable) as caught:
            await executor.restart()
        assert "3 KV blocks of 16 slots, but 4 are required" in str(caught.value.__cause__)
        assert executor.num_restarts == 3
