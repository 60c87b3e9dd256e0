"""The conversation that opens a worker's life: settings to all, progress back, then reports.

The first worker that refuses or dies ends it for all; the line that comes out is the cause, not
what the others made of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.errors import StartupError
from engine.step import WorkerReport, WorkerSettings
from engine.transport.launcher import LaunchedWorker
from engine.transport.wire import (
    FrameReader,
    LoadRefused,
    LoadWorker,
    Progress,
    WireError,
    WorkerLoaded,
    frame,
    read_from_worker,
)

RECEIVE_BYTES = 1 << 16
LAST_WORDS_SECONDS = 2.0  # to a process that has hung up, before it is pushed

OnProgress = Callable[[str, int, int], None]  # what, done, total


async def load_all(
    workers: Sequence[LaunchedWorker], settings: WorkerSettings, on_progress: OnProgress
) -> WorkerReport:
    """Have all workers load; what they learned, with the KV bytes of all of them.

    Raises `StartupError` with one line, of a worker in several with its stage and rank.
    """
    progress = _Sum(len(workers), on_progress)
    loadings = [_Loading(worker, progress) for worker in workers]
    tasks = [
        asyncio.create_task(loading.load(replace(settings, placement=loading.worker.placement)))
        for loading in loadings
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        # Whose process died says so a little later than who was told of it by the data plane.
        dying = [task for loading, task in zip(loadings, tasks, strict=True) if loading.hung_up]
        if dying:
            await asyncio.wait(dying)
        for task in (*dying, *tasks):
            if task.done() and (error := task.exception()) is not None:
                raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    reports = [task.result() for task in tasks]
    whole = sum(report.bytes_per_block for report in reports)
    return replace(reports[-1], bytes_per_block=whole)


class _Loading:
    """One worker on its way to its report."""

    def __init__(self, worker: LaunchedWorker, progress: "_Sum") -> None:
        self.worker = worker
        self.hung_up = False
        self._progress = progress

    async def load(self, settings: WorkerSettings) -> WorkerReport:
        """Raises `StartupError`, also when the process dies over it."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.worker.connection, frame(LoadWorker(settings)))
            return await self._await_report()
        except WireError as error:
            raise self._refusal(f"the worker and we talk past each other: {error}") from error
        except (EOFError, ConnectionError):
            self.hung_up = True
            how = await self.worker.end(LAST_WORDS_SECONDS)
            raise self._refusal(f"the worker {how} while loading") from None

    async def _await_report(self) -> WorkerReport:
        loop = asyncio.get_running_loop()
        frames = FrameReader()
        while piece := await loop.sock_recv(self.worker.connection, RECEIVE_BYTES):
            for payload in frames.feed(piece):
                match read_from_worker(payload):
                    case Progress(what, done, total):
                        self._progress.add(self.worker.placement.index, what, done, total)
                    case WorkerLoaded(report):
                        return report
                    case LoadRefused(line):
                        raise self._refusal(line)
                    case other:
                        raise WireError(f"{type(other).__name__} came before the report")
        raise EOFError

    def _refusal(self, line: str) -> StartupError:
        placement = self.worker.placement
        return StartupError(line if placement.num_workers == 1 else f"{placement}: {line}")


class _Sum:
    """The progress of several workers as that of one; who said nothing yet counts as the mean."""

    def __init__(self, num_workers: int, on_progress: OnProgress) -> None:
        self._num_workers = num_workers
        self._on_progress = on_progress
        self._told: dict[str, dict[int, tuple[int, int]]] = {}

    def add(self, worker: int, what: str, done: int, total: int) -> None:
        told = self._told.setdefault(what, {})
        told[worker] = done, total
        known = sum(total for _, total in told.values())
        self._on_progress(
            what, sum(done for done, _ in told.values()), known * self._num_workers // len(told)
        )
