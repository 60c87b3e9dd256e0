"""Loads all workers: sends each its settings, receives progress, then a report from each.

If one worker fails or dies, loading fails for all. The error is that worker's own, not one that
other workers report because they lost their connection to it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.errors import KernelFaulted, StartupError
from engine.lora import common_report
from engine.transport.launcher import LaunchedWorker
from engine.transport.wire import (
    FrameReader,
    LoadFailed,
    LoadProgress,
    LoadWorker,
    WireError,
    WorkerLoaded,
    frame,
    read_from_worker,
)
from engine.worker_settings import WorkerReport, WorkerSettings

RECEIVE_BYTES = 1 << 16
EXIT_SECONDS = 2.0  # for a process that closed its connection, before it is terminated

OnProgress = Callable[[str, int, int], None]  # what, done, total


async def load_all(
    workers: Sequence[LaunchedWorker], settings: WorkerSettings, on_progress: OnProgress
) -> WorkerReport:
    """Load all workers. Returns the last one's report with `bytes_per_block` summed over all, and
    their common reports of LoRA adapters.

    Raises `StartupError` with one line; if there are several workers, it names stage and rank.
    `KernelFaulted` says that new workers may load.
    """
    progress = _TotalProgress(len(workers), on_progress)
    loadings = [_Loading(worker, progress) for worker in workers]
    tasks = [
        asyncio.create_task(loading.load(replace(settings, placement=loading.worker.placement)))
        for loading in loadings
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        # A worker that lost its peer on the data plane may report before the dead one is reaped,
        # so wait for the dead ones and raise their errors first.
        dead = [task for loading, task in zip(loadings, tasks, strict=True) if loading.hung_up]
        if dead:
            await asyncio.wait(dead)
        for task in (*dead, *tasks):
            if task.done() and (error := task.exception()) is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    reports = [task.result() for task in tasks]
    bytes_per_block = sum(report.bytes_per_block for report in reports)
    loras = tuple(map(common_report, zip(*(report.loras for report in reports), strict=True)))
    return replace(reports[-1], bytes_per_block=bytes_per_block, loras=loras)


class WorkerKilled(StartupError):
    """A worker was killed from outside while it was loading."""


class _Loading:
    """The loading of one worker."""

    def __init__(self, worker: LaunchedWorker, progress: "_TotalProgress") -> None:
        self.worker = worker
        self.hung_up = False
        self._progress = progress

    async def load(self, settings: WorkerSettings) -> WorkerReport:
        """Raises `StartupError`, also if the process dies while loading."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.worker.connection, frame(LoadWorker(settings)))
            return await self._await_report()
        except WireError as error:
            raise self._failure(f"protocol error while loading the worker: {error}") from error
        except (EOFError, ConnectionError):
            self.hung_up = True
            ended = await self.worker.end(EXIT_SECONDS)
            failure = self._failure(f"the worker {ended.description} while loading")
            raise (WorkerKilled(*failure.args) if ended.is_kill else failure) from None

    async def _await_report(self) -> WorkerReport:
        loop = asyncio.get_running_loop()
        frames = FrameReader()
        while piece := await loop.sock_recv(self.worker.connection, RECEIVE_BYTES):
            for payload in frames.feed(piece):
                match read_from_worker(payload):
                    case LoadProgress(what, done, total):
                        self._progress.add(self.worker.placement.index, what, done, total)
                    case WorkerLoaded(report):
                        return report
                    case LoadFailed(message, may_retry):
                        failure = self._failure(message)
                        raise KernelFaulted(*failure.args) if may_retry else failure
                    case other:
                        raise WireError(f"{type(other).__name__} arrived before the report")
        raise EOFError

    def _failure(self, line: str) -> StartupError:
        placement = self.worker.placement
        return StartupError(line if placement.num_workers == 1 else f"{placement}: {line}")


class _TotalProgress:
    """The progress of several workers as one; a worker without a report yet counts as average."""

    def __init__(self, num_workers: int, on_progress: OnProgress) -> None:
        self._num_workers = num_workers
        self._on_progress = on_progress
        self._reported: dict[str, dict[int, tuple[int, int]]] = {}

    def add(self, worker: int, what: str, done: int, total: int) -> None:
        reported = self._reported.setdefault(what, {})
        reported[worker] = done, total
        known = sum(total for _, total in reported.values())
        self._on_progress(
            what,
            sum(done for done, _ in reported.values()),
            known * self._num_workers // len(reported),
        )
