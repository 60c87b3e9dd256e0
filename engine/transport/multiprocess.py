"""Runs steps in worker processes, one for each stage and rank, and restarts them when one dies.

The launcher starts all workers together; once all have loaded, a `StepChannel` over their sockets
carries the steps. When one worker is lost, the futures in flight fail at once and the other
workers are killed; `restart` and `close` release what is left of them. `RestartBackoff` decides
whether they are restarted.

Restarted workers compute a trial step, one token of no request, before `restart` returns. So if
they die afterwards, the cause is a request or a kill from outside: no number of such deaths is a
crash loop, which would end the server.
"""

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from engine.errors import KernelFaulted, StartupError, Unavailable, WorkerLost
from engine.lora import LoraReport, LoraSpec
from engine.media import ImagePixels
from engine.pooling import PoolSpec
from engine.setting import advanced, setting
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.transport.channel import ResultFuture
from engine.transport.launcher import Launcher
from engine.transport.process import LocalLauncher
from engine.transport.trace import TraceFile
from engine.transport.worker_group import RestartBackoff, WorkerGroup
from engine.transport.worker_startup import OnProgress, WorkerKilled
from engine.worker_settings import WorkerReport, WorkerSettings

logger = logging.getLogger(__name__)

_TRIAL_ID = 1 << 41  # the trial step and its request have it; an engine's own ids are lower


@dataclass(frozen=True, slots=True)
class MultiprocessSettings:
    """Number of workers, their class and their time limits.

    `worker` is the class that each process runs, as "module:Class"; `env` is added to this
    process's environment. `depth` is the largest number of steps in flight, at least one for each
    stage. A step longer than `step_seconds` counts as a hang. `max_restarts` limits restarts in a
    row without a completed step; `restart_pause` is the first pause between them.
    """

    num_stages: int = setting(
        1,
        "workers",
        "pipeline-parallel stages; each computes a share of the layers",
        "S",
        name="pipeline_stages",
        ge=1,
        le=64,
    )
    num_ranks: int = setting(
        1,
        "workers",
        "tensor-parallel ranks of each stage; there are S × R worker processes",
        "R",
        name="tensor_ranks",
        ge=1,
        le=64,
    )
    depth: int = 1
    worker: str = "engine.worker.process.worker:Worker"
    env: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = advanced(
        120.0,
        "workers",
        "timeout of an iteration; a worker that takes longer is restarted",
        "SECONDS",
        gt=0,
    )
    close_seconds: float = 5.0
    max_restarts: int = advanced(
        5,
        "workers",
        "maximum worker restarts in a row without a completed iteration; then the server ends",
        "N",
        ge=0,
    )
    restart_pause: float = 1.0


class MultiprocessExecutor:
    """A `StepExecutor` over worker processes. Call `start` before the first step, `close` last.

    The workers are child processes unless another `launcher` is given; `close` closes it. With a
    `trace` the workers report the times of each step; the caller closes it.
    """

    def __init__(
        self,
        worker: WorkerSettings,
        settings: MultiprocessSettings,
        launcher: Launcher | None = None,
        trace: TraceFile | None = None,
    ) -> None:
        self._worker = replace(worker, traces=trace is not None)
        self._settings = settings
        self._launcher = launcher or LocalLauncher(settings.worker, settings.env)
        self._group = WorkerGroup(settings.step_seconds, trace)
        self._backoff = RestartBackoff(settings.max_restarts, settings.restart_pause)
        self._pools = False  # whether the model pools, known from the first start on
        self._num_restarts = 0
        self._closed = asyncio.Event()
        self._on_lora_lost: Callable[[LoraReport], object] = lambda report: None

    def __repr__(self) -> str:
        channel = self._group.channel
        in_flight = channel.num_in_flight if channel else 0
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
        """The workers' process ids by stage and rank; empty before the start and after the end."""
        return self._group.pids

    @property
    def is_alive(self) -> bool:
        """Whether the workers are loaded and accept steps."""
        return self._group.is_alive

    @property
    def num_restarts(self) -> int:
        """How many times the workers were started again, failed attempts included."""
        return self._num_restarts

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost` whenever the workers are lost. A later call replaces the callback."""
        self._group.on_lost = on_lost

    def watch_loras(self, on_lost: Callable[[LoraReport], object]) -> None:
        """Call `on_lost` for each LoRA adapter that restarted workers could not load again."""
        self._on_lora_lost = on_lost

    async def start(self, on_progress: OnProgress) -> WorkerReport:
        """Launch the workers and load the model; calls `on_progress(what, done, total)`.

        Raises `StartupError` with a worker's own message, or with how its process ended.
        """
        report = await self._first_open(on_progress)
        if failed := [lora for lora in report.loras if lora.error]:
            await self._group.end("a LoRA adapter cannot be loaded")
            raise StartupError(failed[0].error)
        # Restarted workers must have as many blocks, as the KV ledger is built for them, and LoRA
        # adapters of the same bytes. A successor of the server may have locked the disk tier then.
        slots = report.num_blocks // max(1, len(report.windows)) * report.block_size
        kv = replace(self._worker.kv, kv_slots=slots, kv_memory=None, num_states=report.num_states)
        self._worker = replace(
            self._worker,
            kv=kv,
            tiers=replace(self._worker.tiers, disk_kv_shared=True),
            loras=tuple(
                spec._replace(digest=lora.digest)
                for spec, lora in zip(self._worker.loras, report.loras, strict=True)
            ),
        )
        self._pools = report.pooling is not None
        return report

    async def _first_open(self, on_progress: OnProgress) -> WorkerReport:
        """Start workers until they have left out each GPU kernel that faults while it is tried."""
        faults: set[str] = set()
        while True:
            try:
                return await self._open(self._worker, on_progress)
            except KernelFaulted as error:
                if str(error) in faults:  # it cannot be noted, so it would fault for ever
                    raise
                faults.add(str(error))
                logger.warning("%s; the workers start again without it", error)

    async def load_lora(self, spec: LoraSpec) -> LoraReport:
        """Load an adapter in all workers; restarted workers load it again.

        The report has the error if it cannot be loaded. Raises `WorkerLost`.
        """
        channel = self._group.channel
        assert channel is not None, "load_lora before start"
        report = await channel.load_lora(spec)
        if channel.ended is not None:  # restarted workers do not have it
            raise WorkerLost(channel.ended)
        if report.error:
            channel.unload_lora(spec.lora_id)  # others of the workers may have it
        else:
            loaded = spec._replace(digest=report.digest)
            self._worker = replace(self._worker, loras=(*self._worker.loras, loaded))
        return report

    def unload_lora(self, lora_id: int) -> None:
        """Free an adapter, which no step in flight uses, in all workers."""
        self._forget_lora(lora_id)
        if self._group.channel is not None:
            self._group.channel.unload_lora(lora_id)

    async def send_pixels(self, piece: ImagePixels) -> None:
        """Send a piece of an image to the workers that encode it."""
        if self._group.channel is not None:
            await self._group.channel.send_pixels(piece)

    def _forget_lora(self, lora_id: int) -> None:
        left = tuple(spec for spec in self._worker.loras if spec.lora_id != lora_id)
        self._worker = replace(self._worker, loras=left)

    def submit(self, step: Step) -> ResultFuture:
        """Send the step to the workers. If they are lost, the future has already failed."""
        assert self._group.channel is not None, "submit before start"
        assert self._group.channel.num_in_flight < self.depth, "more steps in flight than depth"
        return self._group.channel.submit(step)

    async def restart(self) -> None:
        """End the present workers and start new ones with the same settings and KV slots.

        The new workers write to the first KV block, which must belong to no request. Retries a
        failed start, with growing pauses. Raises `Unavailable` in a crash loop and after `close`.
        """
        exits = await self._group.end("the workers are being restarted")
        channel = self._group.channel
        assert channel is not None, "restart before start"
        if channel.num_results:
            self._backoff.progressed()
        elif channel.num_lost:
            self._backoff.crashed(is_kill=any(exit.is_kill for exit in exits))
        failure: StartupError | None = None
        while True:
            await _pause(self._backoff, self._closed, failure)
            self._num_restarts += 1
            try:
                report = await self._open(self._worker, lambda *_: None, is_restart=True)
            except StartupError as error:
                logger.warning("the new workers could not start: %s", error)
                failure = error
                self._backoff.crashed(is_kill=isinstance(error, WorkerKilled))
            else:
                self._drop_failed_loras(report)
                return

    def _drop_failed_loras(self, report: WorkerReport) -> None:
        """Adapters whose files are gone or have other bytes are not served any more."""
        for lora in report.loras:
            if lora.error:
                logger.error("%s", lora.error)
                self._forget_lora(lora.lora_id)
                self._on_lora_lost(lora)

    async def close(self) -> None:
        """End the workers: send a goodbye, wait, terminate, kill. Idempotent.

        `restart` raises `Unavailable` afterwards.
        """
        self._closed.set()
        grace = self._settings.close_seconds if self.is_alive else 0.0
        await self._group.end("the executor was closed", grace)
        await self._launcher.close()

    async def _open(
        self, settings: WorkerSettings, on_progress: OnProgress, *, is_restart: bool = False
    ) -> WorkerReport:
        group, own = self._group, self._settings
        assert not group.pids, "start while workers are running"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(group.end, "the workers did not start")
            workers = await self._launcher.launch(own.num_stages, own.num_ranks)
            report = await group.load(workers, settings, on_progress)
            if self._closed.is_set():
                raise Unavailable("the executor was closed")
            group.connect()
            if is_restart:
                await group.try_step(_trial_step(pools=self._pools))
            stack.pop_all()
        return report


async def _pause(
    backoff: RestartBackoff, closed: asyncio.Event, failure: StartupError | None
) -> None:
    """Wait until the next restart is due. Raises `Unavailable` if there will be none."""
    try:
        seconds = backoff.next_pause()
    except Unavailable as error:
        raise error from failure
    if seconds:
        logger.warning("the workers restart in %g s", seconds)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closed.wait(), seconds)
    if closed.is_set():
        raise Unavailable("the executor was closed")


def _trial_step(*, pools: bool) -> Step:
    """One token in the first KV block, sampled from or, if the model does that, pooled."""
    block = array("i", [0]).tobytes()
    sample, pooling = (None, PoolSpec()) if pools else (SampleSpec(SamplingParams()), None)
    entry = StepEntry(RequestId(_TRIAL_ID), 0, (0,), block, sample, pooling=pooling)
    return Step(StepId(_TRIAL_ID), (entry,))
