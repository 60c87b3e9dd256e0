"""A worker of the GPU's kind on stand-ins: reference attention with graphs, late streams."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from torch import Tensor

from adapters.attention.reference import ReferenceAttention
from engine.errors import StepFailed, Unavailable, WorkerLost
from engine.media import ImagePixels
from engine.step import Step, StepResult
from engine.worker.cuda.device import CudaDevice, NoThreadPool
from engine.worker.cuda.kernels.library import NO_KERNELS, TritonKernels
from engine.worker.launched import StepInFlight
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    KVTensors,
    MakesAttention,
    PreferredFormat,
    RaggedLayout,
    RopeAngles,
)
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerReport, WorkerSettings
from tests.engine.worker.cuda.standing import StandingGpu, gpu_settings
from tests.worker_settings import changed


class CapturableReference(ReferenceAttention):
    """Asserts that each run of the layers has its own plan, and each graph one, too."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors, pool: NoThreadPool) -> None:
        super().__init__(spec, cache, pool)
        self._num_layers = len(cache.keys)
        self._left = 0  # layers that may still run under the plan
        self.planned: list[int] = []  # rows of each plan for a graph, negative with prompts

    def plan(self, layout: RaggedLayout) -> None:
        assert self._left == 0, "planned twice, and not run"
        self._left = self._num_layers
        super().plan(layout)

    def plan_captured(self, layout: RaggedLayout) -> tuple[int, ...]:
        rows = layout.num_tokens
        self.planned.append(rows if layout.is_decode_only else -rows)
        self._left = 0  # a capture records and does not run
        self.plan(layout)
        return (rows, self._num_layers)

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: RopeAngles | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert self._left == self._num_layers - layer, "run without a plan"
        self._left -= 1
        return super().run(layer, q, k, v, rope, sinks)


class StandInDevice(CudaDevice):
    """A stand-in for a GPU that only checks rules."""

    def __init__(self, settings: WorkerSettings, gpu: StandingGpu | None = None) -> None:
        gpu = gpu or StandingGpu(total_bytes=1 << 31)
        super().__init__(changed(settings, dtype="float32"), gpu)
        self.gpu = gpu
        self.streams = gpu.of_it
        self.made: list[CapturableReference] = []

    def beside(self, preferred: PreferredFormat) -> "StandInDevice":
        return StandInDevice(self._settings, self.gpu)

    def backend(
        self, makes: MakesAttention, spec: AttentionSpec, cache: KVTensors
    ) -> AttentionBackend:
        self.made.append(CapturableReference(spec, cache, NoThreadPool()))
        return self.made[-1]


class Launches(Protocol):
    """A worker, or what launches its steps under some rules."""

    def launch(self, step: Step) -> StepInFlight: ...


class LaunchesSteps(Launches, Protocol):
    """With the worker."""

    @property
    def worker(self) -> Worker: ...


@dataclass(frozen=True)
class OnStandIns:
    """A worker and its stand-in for a GPU."""

    worker: Worker
    device: StandInDevice
    progress: list[tuple[str, int, int]]

    @property
    def report(self) -> WorkerReport:
        return self.worker.report

    def put_pixels(self, piece: ImagePixels) -> None:
        self.worker.put_pixels(piece)

    def run(self, step: Step) -> StepResult:
        """The result of a step that is launched within the rules."""
        return self.launch(step).collect().result

    def launch(self, step: Step) -> StepInFlight:
        """Within the rules of a step."""
        with self.device.streams.stepping():
            return self.worker.launch(step)


def on_stand_ins(
    model: object, kernels: TritonKernels = NO_KERNELS, **changes: object
) -> OnStandIns:
    """A worker loaded from a checkpoint; `changes` are fields of its settings."""
    settings = gpu_settings(model, **changes)
    device = StandInDevice(settings)
    device._triton = kernels  # reference attention would leave them out
    progress: list[tuple[str, int, int]] = []
    worker = Worker.load(settings, lambda *news: progress.append(news), device)
    return OnStandIns(worker, device, progress)


@dataclass(eq=False)
class LaunchingExecutor:
    """A `StepExecutor` that launches a step when it is submitted and collects it, in order, some
    iterations of the event loop later, as the thread that answers for a worker would."""

    worker: Launches
    depth: int
    random: Random
    is_alive: bool = True
    on_failure: Callable[[Step], None] = lambda step: None
    _in_flight: deque["tuple[StepInFlight | Exception, asyncio.Future[StepResult]]"] = field(
        default_factory=deque
    )

    def watch(self, on_lost: Callable[[], object]) -> None:
        """This worker is lost in a step or not at all."""

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        assert len(self._in_flight) < self.depth
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[StepResult] = loop.create_future()
        try:
            launched: StepInFlight | Exception = self.worker.launch(step)
        except WorkerLost:
            raise
        except Exception as error:
            launched = StepFailed(str(error))
        self._in_flight.append((launched, answer))
        self._after(self.random.randrange(4), self._collect)
        return answer

    async def restart(self) -> None:
        raise Unavailable("a worker in this process is not started again")

    def _after(self, turns: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(then if turns == 0 else lambda: self._after(turns - 1, then))

    def _collect(self) -> None:
        launched, answer = self._in_flight.popleft()
        if answer.cancelled():
            return
        try:
            if isinstance(launched, Exception):
                raise launched
            answer.set_result(launched.collect().result)
        except Exception as error:  # the entry point of a worker without a process
            answer.set_exception(error)
