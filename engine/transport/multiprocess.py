"""Steps run in worker processes, one for each stage and rank; they may die, and are started
again, all together, a bounded number of times.

A life is what the launcher launched and, once all have loaded, a `StepChannel` over their
sockets. The loss of one worker fails the futures at once and kills the others; `restart` and
`close` free what is left of them.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from engine.errors import StartupError, Unavailable
from engine.ports import Clock
from engine.step import Step, WorkerReport, WorkerSettings
from engine.transport.channel import StepAnswer, StepChannel
from engine.transport.launcher import LaunchedWorker, Launcher
from engine.transport.process import LocalLauncher
from engine.transport.trace import TraceFile
from engine.transport.worker_startup import OnProgress, load_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MultiprocessSettings:
    """How the processes are kept; `worker` is the class they run, `env` goes on top of ours.

    `depth` steps are in flight at most: at least one for each stage, to keep all busy. A step that
    takes longer than `step_seconds` counts as a hang. At most `max_restarts` starts happen within
    any `restart_seconds`.
    """

    num_stages: int = 1
    num_ranks: int = 1
    depth: int = 1
    worker: str = "engine.worker.process.worker:Worker"
    env: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = 120.0
    close_seconds: float = 5.0
    max_restarts: int = 3
    restart_seconds: float = 600.0


class MultiprocessExecutor:
    """A `StepExecutor` over processes. `start` before the first step, `close` at last.

    The workers are child processes unless another `launcher` is given, which is closed with us.
    With a `trace` the workers tell the times of each step; it is not ours to close.
    """

    def __init__(
        self,
        worker: WorkerSettings,
        settings: MultiprocessSettings,
        clock: Clock = time.monotonic,
        launcher: Launcher | None = None,
        trace: TraceFile | None = None,
    ) -> None:
        self._worker = replace(worker, traces=trace is not None)
        self._settings = settings
        self._clock = clock
        self._launcher = launcher or LocalLauncher(settings.worker, settings.env)
        self._trace = trace
        self._workers: Sequence[LaunchedWorker] = ()
        self._channel: StepChannel | None = None
        self._restarts: deque[float] = deque(maxlen=settings.max_restarts)
        self._num_restarts = 0
        self._is_closed = False
        self._on_lost: Callable[[], object] = _tell_nobody

    def __repr__(self) -> str:
        in_flight = self._channel.num_in_flight if self._channel else 0
        state = "alive" if self.is_alive else "not alive"
        return (
            f"<MultiprocessExecutor pids={self.pids} {state} in_flight={in_flight} "
            f"restarts={self._num_restarts}>"
        )

    @property
    def depth(self) -> int:
        return self._settings.depth

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, stage by stage, from their start until they are ended."""
        return [worker.pid for worker in self._workers]

    @property
    def is_alive(self) -> bool:
        """Whether loaded workers are there to take steps."""
        return self._channel is not None and self._channel.ended is None

    @property
    def num_restarts(self) -> int:
        """Starts after the first, successful or not."""
        return self._num_restarts

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` after each loss of the worker; only the last caller is told."""
        self._on_lost = on_lost

    async def start(self, on_progress: OnProgress) -> WorkerReport:
        """Launch the workers and have them load; `on_progress(what, done, total)` as they go.

        Raises `StartupError` with a worker's own line, or with how its process died.
        """
        report = await self._open(self._worker, on_progress)
        # The ledger counts on these blocks from now on, so later workers must have as many.
        self._worker = replace(self._worker, kv_slots=report.num_blocks * report.block_size)
        return report

    def submit(self, step: Step) -> StepAnswer:
        """Hand the step to the workers. Without them the future has already failed."""
        assert self._channel is not None, "submit before start"
        assert self._channel.num_in_flight < self.depth, "more steps in flight than depth"
        return self._channel.submit(step)

    async def restart(self) -> None:
        """End the workers that there are, and start others with the same settings and slots.

        Tries again after a refusal. Raises `Unavailable` past the bound and after `close`.
        """
        await self._end("the workers are being restarted", grace=0.0)
        refusal: StartupError | None = None
        while True:
            self._count_restart(refusal)
            try:
                await self._open(self._worker, _no_progress)
            except StartupError as error:
                logger.warning("the new workers refused to start: %s", error)
                refusal = error
            else:
                return

    async def close(self) -> None:
        """End the workers: goodbye, wait, terminate, kill. Idempotent; no `restart` after it."""
        self._is_closed = True
        grace = self._settings.close_seconds if self.is_alive else 0.0
        await self._end("the executor was closed", grace)
        await self._launcher.close()

    async def _open(self, settings: WorkerSettings, on_progress: OnProgress) -> WorkerReport:
        assert not self._workers, "start on top of workers"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end, "the workers did not start", grace=0.0)
            self._workers = await self._launcher.launch(
                self._settings.num_stages, self._settings.num_ranks
            )
            report = await load_all(self._workers, settings, on_progress)
            if report.num_blocks * report.block_size < settings.kv_slots:
                raise StartupError(
                    f"the worker has {report.num_blocks} blocks of {report.block_size} slots "
                    f"where {settings.kv_slots} slots were asked for"
                )
            if self._is_closed:
                raise Unavailable("the executor was closed")
            stack.pop_all()
        self._channel = StepChannel(
            {worker.placement: worker.connection for worker in self._workers},
            self._settings.step_seconds,
            self._lost,
            self._trace,
        )
        return report

    def _lost(self, reason: str) -> None:
        logger.error("workers %s are lost: %s", self.pids, reason)
        for worker in self._workers:
            worker.kill()
        self._on_lost()

    async def _end(self, reason: str, grace: float) -> None:
        if self._channel is not None:
            self._channel.close(reason)
        workers, self._workers = self._workers, ()
        endings = await asyncio.gather(*(worker.end(grace) for worker in workers))
        for worker, how in zip(workers, endings, strict=True):
            logger.info("worker %d %s", worker.pid, how)

    def _count_restart(self, refusal: StartupError | None) -> None:
        if self._is_closed:
            raise Unavailable("the executor was closed")
        now = self._clock()
        starts = self._restarts
        while starts and starts[0] <= now - self._settings.restart_seconds:
            starts.popleft()
        if len(starts) == self._settings.max_restarts:
            raise Unavailable(
                f"the worker was started again {len(starts)} times "
                f"within {self._settings.restart_seconds:g} s"
            ) from refusal
        starts.append(now)
        self._num_restarts += 1


def _tell_nobody() -> None:
    """Until somebody watches."""


def _no_progress(what: str, done: int, total: int) -> None:
    """A restart is silent."""
