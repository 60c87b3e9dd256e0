import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import uvloop

from engine.errors import KernelFaulted, StartupError, StepFailed, Unavailable, WorkerLost
from engine.transport.multiprocess import MultiprocessExecutor
from engine.transport.process import LocalLauncher
from engine.worker_settings import WorkerSettings
from tests.engine.transport.echo_workers import ECHO, crash, no_progress, started
from tests.engine.transport.workers import REPORT, Command
from tests.fakes import a_step
from tests.worker_settings import worker_settings

pytestmark = pytest.mark.usefixtures("no_process_or_file_descriptor_is_left")
PARENT = """
import asyncio, signal
from engine.worker_settings import WorkerSettings
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from tests.fakes import a_step
from tests.engine.transport.echo_workers import ECHO, crash, no_progress, started
from tests.engine.transport.workers import Command

async def main():
    settings = MultiprocessSettings(worker="tests.engine.transport.workers:EchoWorker")
    executor = MultiprocessExecutor(WorkerSettings(model="echo"), settings)
    await executor.start(lambda what, done, total: None)
    executor.submit(a_step(1, FIRST_TOKEN))
    print(*executor.pids, flush=True)
    signal.pause()

asyncio.run(main())
"""


async def test_start_reports_progress_and_returns_the_workers_report() -> None:
    seen: list[tuple[str, int, int]] = []
    executor = MultiprocessExecutor(WorkerSettings(model="echo"), ECHO)
    assert not executor.is_alive
    report = await executor.start(lambda what, done, total: seen.append((what, done, total)))
    assert report == REPORT
    assert seen == [("weights", 0, 2), ("weights", 2, 2)]
    assert executor.is_alive
    await executor.close()
    assert not executor.is_alive


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("fail", "^layers: no such thing$"),
        ("raise", "^the worker could not load: ValueError: two lines$"),
        ("exit", "^the worker ended with exit code 3 while loading$"),
        ("send garbage", "^protocol error while loading the worker: a frame of"),
    ],
)
async def test_a_worker_that_cannot_load_fails_the_start_with_a_readable_message_and_no_other(
    model: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor = MultiprocessExecutor(WorkerSettings(model=model), ECHO)
    with caplog.at_level(logging.INFO), pytest.raises(StartupError, match=line):
        await executor.start(no_progress)
    assert not executor.pids
    assert caplog.messages == []


async def test_workers_start_again_without_the_kernels_that_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(ECHO, env={"NOTES": str(tmp_path)})
    async with started(settings, "faults") as executor:
        assert executor.is_alive
    again = [each for each in caplog.messages if "start again without it" in each]
    assert again == [
        f"the kernel {name!r} made the GPU fault; the workers start again without it"
        for name in ("first", "second")
    ]


async def test_a_kernel_that_faults_again_ends_the_start(tmp_path: Path) -> None:
    settings = replace(ECHO, env={"NOTES": str(tmp_path)})
    executor = MultiprocessExecutor(WorkerSettings(model="faults for ever"), settings)
    with pytest.raises(KernelFaulted, match="the kernel 'first' made the GPU fault"):
        await executor.start(no_progress)
    assert not executor.pids


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("one fails", "^stage 1 rank 0: no such thing$"),
        ("one exits", "^stage 1 rank 0: the worker ended with exit code 3 while loading$"),
    ],
)
async def test_the_error_names_the_worker_that_cannot_load(
    tmp_path: Path, model: str, line: str
) -> None:
    os.mkfifo(tmp_path / "fifo")
    env = {"FIFO": str(tmp_path / "fifo")}
    settings = replace(ECHO, num_stages=2, num_ranks=2, env=env)
    executor = MultiprocessExecutor(WorkerSettings(model=model), settings)
    with pytest.raises(StartupError, match=line):
        await executor.start(no_progress)


async def test_the_progress_of_several_workers_is_that_of_one() -> None:
    seen: list[tuple[str, int, int]] = []
    executor = MultiprocessExecutor(WorkerSettings(model="echo"), replace(ECHO, num_stages=3))
    report = await executor.start(lambda what, done, total: seen.append((what, done, total)))
    assert {total for _, _, total in seen} == {6}
    assert seen[-1] == ("weights", 6, 6)
    assert report.bytes_per_block == 3 * REPORT.bytes_per_block
    await executor.close()


async def test_when_one_worker_dies_all_others_are_killed() -> None:
    async with started(replace(ECHO, num_stages=2, num_ranks=2)) as executor:
        workers = [psutil.Process(pid) for pid in executor.pids]
        hanging = executor.submit(a_step(1, Command.HANG))
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="the worker of stage 0 rank 1 closed the connection"):
            await hanging
        await executor.restart()
        assert not any(worker.is_running() for worker in workers)
        assert (await executor.submit(a_step(2, 20))).tokens == (21,)


@pytest.mark.parametrize(
    ("worker", "line"),
    [
        (
            "tests.engine.transport.no_such_module:Worker",
            "No module named 'tests.engine.transport.no_such_mod",
        ),
        ("tests.engine.transport.workers:NoWorker", "has no attribute 'NoWorker'"),
    ],
)
async def test_a_missing_worker_class_fails_the_start_with_a_readable_message(
    worker: str, line: str
) -> None:
    executor = MultiprocessExecutor(WorkerSettings(model="echo"), replace(ECHO, worker=worker))
    with pytest.raises(StartupError, match=line):
        await executor.start(no_progress)


async def test_a_process_that_cannot_be_spawned_fails_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(StartupError, match="cannot start a worker process:"):
        await MultiprocessExecutor(WorkerSettings(model="echo"), ECHO).start(no_progress)


async def test_settings_that_cannot_be_sent_fail_the_start() -> None:
    executor = MultiprocessExecutor(worker_settings(model="echo", kv_memory=2**64), ECHO)
    with pytest.raises(StartupError, match="cannot be sent"):
        await executor.start(no_progress)


async def test_a_worker_killed_while_loading_fails_the_start_and_the_error_names_the_signal() -> (
    None
):
    executor = MultiprocessExecutor(WorkerSettings(model="hang"), ECHO)

    def kill(what: str, done: int, total: int) -> None:
        os.kill(executor.pids[0], signal.SIGKILL)

    with pytest.raises(StartupError, match=r"was killed by signal 9, Killed .*while loading"):
        await executor.start(kill)


async def test_a_start_that_is_cancelled_leaves_no_worker() -> None:
    loading = asyncio.Event()
    executor = MultiprocessExecutor(WorkerSettings(model="hang"), ECHO)
    start = asyncio.create_task(executor.start(lambda what, done, total: loading.set()))
    await loading.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start


async def test_an_error_of_the_progress_bar_ends_the_start() -> None:
    def raises(what: str, done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await MultiprocessExecutor(WorkerSettings(model="echo"), ECHO).start(raises)


async def test_a_worker_ignores_ctrl_c() -> None:
    async with started() as executor:
        os.kill(executor.pids[0], signal.SIGINT)
        assert (await executor.submit(a_step(1, 10))).tokens == (11,)
        assert os.getpgid(executor.pids[0]) == executor.pids[0]


async def test_a_result_that_cannot_be_sent_fails_only_its_step() -> None:
    async with started() as executor:
        bad, good = (
            executor.submit(a_step(1, Command.UNSENDABLE)),
            executor.submit(a_step(2, 20)),
        )
        with pytest.raises(StepFailed, match="cannot be sent"):
            await bad
        assert (await good).tokens == (21,)


async def test_a_prepared_process_becomes_the_only_worker() -> None:
    launcher = LocalLauncher(ECHO.worker)
    launcher.prepare()
    prepared = launcher.ready[0].pid
    executor = MultiprocessExecutor(WorkerSettings(model="echo"), ECHO, launcher=launcher)
    await executor.start(no_progress)
    assert executor.pids == [prepared]
    await crash(executor)
    await executor.restart()
    assert executor.pids != [prepared]
    assert (await executor.submit(a_step(1, 20))).tokens == (21,)
    await executor.close()


async def test_a_prepared_process_that_is_not_used_is_ended() -> None:
    """By a model with several workers, and by a close before the start."""
    settings, before = replace(ECHO, num_ranks=2), psutil.Process().children()
    for is_started in (True, False):
        launcher = LocalLauncher(ECHO.worker)
        launcher.prepare()
        executor = MultiprocessExecutor(WorkerSettings(model="echo"), settings, launcher=launcher)
        if is_started:
            await executor.start(no_progress)
            assert len(psutil.Process().children()) == len(before) + 2
        await executor.close()
        assert psutil.Process().children() == before


async def test_the_worker_gets_its_environment_and_its_name() -> None:
    async with started(replace(ECHO, env={"ANSWER": "42"})) as executor:
        assert (await executor.submit(a_step(1, Command.ENVIRONMENT))).tokens == (42,)
        assert psutil.Process(executor.pids[0]).name() == "podway-worker"


async def test_close_during_a_step_fails_it_and_ends_the_worker() -> None:
    executor = MultiprocessExecutor(WorkerSettings(model="echo"), replace(ECHO, close_seconds=0.05))
    await executor.start(no_progress)
    answer = executor.submit(a_step(1, Command.HANG))
    await executor.close()
    with pytest.raises(WorkerLost, match="closed"):
        await answer
    await executor.close()
    with pytest.raises(Unavailable, match="closed"):
        await executor.restart()


async def test_a_close_during_a_start_ends_it() -> None:
    loading = asyncio.Event()
    executor = MultiprocessExecutor(WorkerSettings(model="hang"), ECHO)
    start = asyncio.create_task(executor.start(lambda what, done, total: loading.set()))
    await loading.wait()
    await executor.close()
    with pytest.raises(StartupError, match="while loading"):
        await start


@pytest.mark.parametrize("first_token", [10, Command.HANG])
def test_a_worker_does_not_outlive_a_parent_that_is_killed(first_token: int) -> None:
    script = PARENT.replace("FIRST_TOKEN", str(int(first_token)))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([worker], [], [], 30)
        os.close(worker)
    assert ended


def test_start_steps_loss_and_restart_work_under_uvloop() -> None:
    async def live() -> None:
        async with started() as executor:
            large = a_step(1, *[10] * 20_000)
            answers = [executor.submit(large), executor.submit(a_step(2, 20))]
            assert [(await answer).tokens for answer in answers] == [(11,) * 20_000, (21,)]
            lost = executor.submit(a_step(3, Command.DIE))
            with pytest.raises(WorkerLost):
                await lost
            await executor.restart()
            assert (await executor.submit(a_step(4, 40))).tokens == (41,)
        with pytest.raises(StartupError, match="exit code 3"):
            await MultiprocessExecutor(WorkerSettings(model="exit"), ECHO).start(no_progress)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())
