"""The worker processes of an executor from their launch to their end, and the channel to them.

Decides whether and when lost workers are restarted: at once, after a pause, or not any more.

A restart follows *progress* if the workers have returned a result since they were loaded. Without
progress each restart waits longer than the one before. Workers that crash while loading or in
their first step are in a crash loop, which ends after `max_restarts` such restarts in a row. (The
first step of a restarted worker belongs to no request, see `multiprocess.py`.) Workers that are
killed from outside are restarted any number of times if they make progress between, and `KILLS`
times as often if they do not.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.errors import EngineError, StartupError, Unavailable
from engine.step import Step
from engine.transport.channel import StepChannel
from engine.transport.launcher import LaunchedWorker, WorkerExit
from engine.transport.trace import TraceFile
from engine.transport.worker_startup import OnProgress, load_all
from engine.worker_settings import WorkerReport, WorkerSettings

logger = logging.getLogger(__name__)

EXIT_SECONDS = 1.0  # for a worker that closed its connection, before it is killed


class WorkerGroup:
    """Workers that were launched together; those that follow them take their place.

    `channel` is that of the workers that have loaded last, also after they have ended.
    """

    def __init__(self, step_seconds: float, trace: TraceFile | None) -> None:
        self.channel: StepChannel | None = None
        self.on_lost: Callable[[], object] = lambda: None
        self._workers: Sequence[LaunchedWorker] = ()
        self._step_seconds = step_seconds
        self._trace = trace
        self._is_on_trial = False  # while restarted workers compute their trial step

    @property
    def pids(self) -> list[int]:
        """The workers' process ids by stage and rank; empty before the start and after the end."""
        return [worker.pid for worker in self._workers]

    @property
    def is_alive(self) -> bool:
        """Whether the workers are loaded and accept steps."""
        channel = self.channel
        return channel is not None and channel.ended is None and not self._is_on_trial

    async def load(
        self, workers: Sequence[LaunchedWorker], settings: WorkerSettings, on_progress: OnProgress
    ) -> WorkerReport:
        """Load the model in launched workers. Raises `StartupError`."""
        self._workers = workers
        report = await load_all(workers, settings, on_progress)
        if report.num_blocks < settings.kv.num_blocks:
            raise StartupError(
                f"the worker has {report.num_blocks} KV blocks of {report.block_size} slots, "
                f"but {settings.kv.num_blocks} are required"
            )
        return report

    def connect(self) -> None:
        """Open the channel to workers that have loaded."""
        sockets = {worker.placement: worker.connection for worker in self._workers}
        self.channel = StepChannel(sockets, self._step_seconds, self._lost, self._trace)

    async def try_step(self, step: Step) -> None:
        """Compute a trial step. Raises `StartupError` if the workers cannot."""
        assert self.channel is not None, "a trial before `connect`"
        self._is_on_trial = True
        try:
            await self.channel.submit(step)
        except EngineError as error:
            raise StartupError(f"their trial step failed: {error}") from error
        finally:
            self._is_on_trial = False

    async def end(self, reason: str, grace: float = 0.0) -> list[WorkerExit]:
        """Close the channel and end the processes, with `grace` seconds to end by themselves."""
        if self.channel is not None:
            self.channel.close(reason)
        workers, self._workers = self._workers, ()
        exits = await asyncio.gather(
            *(worker.end(EXIT_SECONDS if self._has_exited(worker) else grace) for worker in workers)
        )
        expected = logging.DEBUG if self.channel is None else logging.INFO  # a start that failed
        for worker, exit in zip(workers, exits, strict=True):
            level = logging.ERROR if self._has_exited(worker) else expected
            logger.log(level, "worker %d %s", worker.pid, exit.description)
        return exits

    def _lost(self, reason: str) -> None:
        logger.error("workers %s are lost: %s", self.pids, reason)
        for worker in self._workers:
            if not self._has_exited(worker):  # so that its own exit status is seen
                worker.kill()
        if not self._is_on_trial:
            self.on_lost()

    def _has_exited(self, worker: LaunchedWorker) -> bool:
        """Whether the worker has closed its connection, as a process does when it ends."""
        return self.channel is not None and self.channel.closed_by == worker.placement


KILLS = 10  # kills from outside that count as one crash


@dataclass(slots=True)
class RestartBackoff:
    """Counts restarts without progress. `max_restarts` 0: never restart.

    The first restart has no pause, the second one `first_pause` seconds; each further pause is
    twice as long, up to `max_pause`, or up to `max_kill_pause` if no worker has crashed by itself:
    whatever killed them, requests wait meanwhile.
    """

    max_restarts: int
    first_pause: float = 1.0
    max_pause: float = 30.0
    max_kill_pause: float = 2.0
    _num_crashes: int = field(default=0, init=False)  # in a row, without progress
    _num_kills: int = field(default=0, init=False)  # in a row, without progress
    _num_restarts: int = field(default=0, init=False)  # in a row, without progress

    def progressed(self) -> None:
        """The lost workers had made progress."""
        self._num_crashes = self._num_kills = self._num_restarts = 0

    def crashed(self, *, is_kill: bool = False) -> None:
        """The workers died while loading or before the first result of a step.

        `is_kill`: they were killed from outside.
        """
        if is_kill:
            self._num_kills += 1
        else:
            self._num_crashes += 1

    def next_pause(self) -> float:
        """Seconds to wait before the next restart. Raises `Unavailable` if it is not allowed."""
        if not self.max_restarts:
            raise Unavailable("the worker was lost, and restarts are disabled")
        if self._num_crashes + self._num_kills / KILLS > self.max_restarts:
            raise Unavailable(
                f"the worker was restarted {self._num_restarts} times in a row "
                "without completing a step"
            )
        doublings = min(self._num_restarts - 1, 30)  # so that the power stays finite
        self._num_restarts += 1
        if doublings < 0:
            return 0.0
        are_kills = self._num_kills and not self._num_crashes
        most = self.max_kill_pause if are_kills else self.max_pause
        return min(self.first_pause * 2.0**doublings, most)
