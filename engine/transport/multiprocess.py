"""Steps run in one worker process of our own; it may die, and is started again a bounded number
of times.

A life is a `WorkerProcess` and, once it has loaded, a `StepChannel` over its socket. The loss of
a worker fails the futures at once and kills what is left of the process; `restart` and `close`
reap it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from engine.errors import RefusedToStart, Unavailable
from engine.ports import Clock
from engine.step import Step, WorkerReport, WorkerSettings
from engine.transport.channel import StepAnswer, StepChannel
from engine.transport.process import OnProgress, WorkerProcess

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MultiprocessSettings:
    """How the process is kept; `worker` is the class it runs, `env` goes on top of ours.

    A step that takes longer than `step_seconds` counts as a hang. At most `max_restarts` starts
    happen within any `restart_seconds`.
    """

    depth: int = 1
    worker: str = "engine.worker.worker:Worker"
    env: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = 120.0
    close_seconds: float = 5.0
    max_restarts: int = 3
    restart_seconds: float = 600.0


class MultiprocessExecutor:
    """A `StepExecutor` over one worker process. `start` before the first step, `close` at last."""

    def __init__(
        self,
        worker: WorkerSettings,
        settings: MultiprocessSettings,
        clock: Clock = time.monotonic,
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._clock = clock
        self._process: WorkerProcess | None = None
        self._channel: StepChannel | None = None
        self._restarts: deque[float] = deque(maxlen=settings.max_restarts)
        self._num_restarts = 0
        self._is_closed = False
        self._on_lost: Callable[[], object] = _tell_nobody

    def __repr__(self) -> str:
        in_flight = self._channel.num_in_flight if self._channel else 0
        state = "alive" if self.is_alive else "not alive"
        return (
            f"<MultiprocessExecutor pid={self.pid} {state} in_flight={in_flight} "
            f"restarts={self._num_restarts}>"
        )

    @property
    def depth(self) -> int:
        return self._settings.depth

    @property
    def pid(self) -> int | None:
        """The worker's process id, from its spawning until it has been reaped."""
        return self._process.pid if self._process else None

    @property
    def is_alive(self) -> bool:
        """Whether a loaded worker is there to take steps."""
        return self._channel is not None and self._channel.ended is None

    @property
    def num_restarts(self) -> int:
        """Starts after the first, successful or not."""
        return self._num_restarts

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` after each loss of the worker; only the last caller is told."""
        self._on_lost = on_lost

    async def start(self, on_progress: OnProgress) -> WorkerReport:
        """Spawn the worker and have it load; `on_progress(what, done, total)` as it goes.

        Raises `RefusedToStart` with the worker's own line, or with how its process died.
        """
        report = await self._open(self._worker, on_progress)
        # The ledger counts on these blocks from now on, so later workers must have as many.
        self._worker = replace(self._worker, kv_slots=report.num_blocks * report.block_size)
        return report

    def submit(self, step: Step) -> StepAnswer:
        """Hand the step to the worker. Without a worker the future has already failed."""
        assert self._channel is not None, "submit before start"
        assert self._channel.num_in_flight < self.depth, "more steps in flight than depth"
        return self._channel.submit(step)

    async def restart(self) -> None:
        """End the worker, if there is one, and start another with the same settings and slots.

        Tries again after a refusal. Raises `Unavailable` past the bound and after `close`.
        """
        await self._end("the worker is being restarted", grace=0.0)
        refusal: RefusedToStart | None = None
        while True:
            self._count_restart(refusal)
            try:
                await self._open(self._worker, _no_progress)
            except RefusedToStart as error:
                logger.warning("the new worker refused to start: %s", error)
                refusal = error
            else:
                return

    async def close(self) -> None:
        """End the worker: goodbye, wait, terminate, kill. Idempotent; no `restart` after it."""
        self._is_closed = True
        grace = self._settings.close_seconds if self.is_alive else 0.0
        await self._end("the executor was closed", grace)

    async def _open(self, worker: WorkerSettings, on_progress: OnProgress) -> WorkerReport:
        assert self._process is None, "start on top of a worker"
        process = WorkerProcess.spawn(self._settings.worker, self._settings.env)
        async with AsyncExitStack() as stack:
            self._process = process
            stack.push_async_callback(self._end, "the worker did not start", grace=0.0)
            report = await process.load(worker, on_progress)
            if report.num_blocks * report.block_size < worker.kv_slots:
                raise RefusedToStart(
                    f"the worker has {report.num_blocks} blocks of {report.block_size} slots "
                    f"where {worker.kv_slots} slots were asked for"
                )
            if self._is_closed:
                raise Unavailable("the executor was closed")
            stack.pop_all()
        self._channel = StepChannel(process.connection, self._settings.step_seconds, self._lost)
        return report

    def _lost(self, reason: str) -> None:
        assert self._process is not None, "a channel without its process"
        logger.error("worker %d is lost: %s", self._process.pid, reason)
        self._process.kill()
        self._on_lost()

    async def _end(self, reason: str, grace: float) -> None:
        if self._channel is not None:
            self._channel.close(reason)
        process, self._process = self._process, None
        if process is not None:
            how = await process.end(grace)
            logger.info("worker %d %s", process.pid, how)

    def _count_restart(self, refusal: RefusedToStart | None) -> None:
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
