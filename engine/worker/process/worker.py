"""A worker: the layers of a stage, or a rank's part of them, and what it is asked to do."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.lora import LoraReport, LoraSpec
from engine.media import ImagePixels
from engine.pooling import PoolSpec
from engine.step import (
    Fault,
    ProposalSpec,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
    StepResult,
    StepTimes,
)
from engine.worker.device import Device, Progress
from engine.worker.launched import StepInFlight
from engine.worker.lora.model import LoraLinear
from engine.worker.process.build import build_worker
from engine.worker.process.parts import WorkerParts
from engine.worker.process.pipeline import StepPipeline
from engine.worker_settings import WorkerReport, WorkerSettings

WARM_UP_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)


class Worker:
    """Holds a shard of a model and runs steps on it, one after the other."""

    def __init__(self, parts: WorkerParts) -> None:
        self.parts = parts
        self.pipeline = StepPipeline(parts)

    @classmethod
    def load(
        cls, settings: WorkerSettings, progress: Progress, device: Device | None = None
    ) -> "Worker":
        """Build a worker, and run two warm-up steps and slices of an image; raises
        `StartupError`."""
        worker = cls(build_worker(settings, progress, device))
        with torch.inference_mode(), worker.parts.device.pool.awake():
            worker.parts.images.warm_up()
        if faults := worker._run_first_steps(worker.parts.limits.block_size):
            raise StartupError(f"{settings.model} cannot be served: {faults[0].message}")
        return worker

    @property
    def report(self) -> WorkerReport:
        return self.parts.report

    @property
    def times(self) -> StepTimes:
        """The times of the step launched last, as far as they are known when it is launched."""
        return self.pipeline.times

    @property
    def lora_linears(self) -> Sequence[LoraLinear]:
        """The linears of this worker that adapters can change."""
        return self.parts.loras.linears

    def load_lora(self, spec: LoraSpec) -> LoraReport:
        """Load a LoRA adapter beside the steps; the report has the error if that fails."""
        self.parts.device.enter_thread()
        return self.parts.loras.load(spec)

    def unload_lora(self, lora_id: int) -> None:
        """Free a LoRA adapter that no step will use any more."""
        self.parts.device.enter_thread()
        self.parts.loras.unload(lora_id)

    def put_pixels(self, piece: ImagePixels) -> None:
        """Keep a piece of an image's pixels until a step encodes it."""
        self.parts.images.put(piece)

    def learn(self, step: Step) -> None:
        """Start preparing a step before it runs; may be called in another thread than `launch`."""
        self.pipeline.learn(step)

    def launch(self, step: Step) -> StepInFlight:
        """Launch a step. After any error but `WorkerLost`, the next step can be launched."""
        return self.pipeline.begin(step)

    def run(self, step: Step) -> StepResult:
        """Compute one step. After any error but `WorkerLost`, the next step can run.

        Only rank 0 of the last stage returns tokens; `seconds` includes all earlier stages.
        """
        return self.launch(step).collect().result

    def abandon(self, step: Step, line: str) -> None:
        """After `launch` raised: send the reason to the next stage, if it waits for the step."""
        self.pipeline.abandon(step, line)

    def logits(self, step: Step) -> Tensor | None:
        """Compute one step without sampling: logits `[entries that sample, vocab]` in float32.

        None except on rank 0 of the last stage.
        """
        return self.pipeline.logits(step)

    def check(self) -> None:
        """Raise `WorkerLost` if the device can compute nothing right."""
        self.parts.device.check()

    def warm_up(self) -> None:
        """Run a prompt whose buffers and code are in memory then, before the first request; not
        beside other workers or on a GPU."""
        if self.parts.plane is None and not self.pipeline.is_async:
            self._run_first_steps(WARM_UP_TOKENS)

    def _run_first_steps(self, num_tokens: int) -> list[Fault]:
        """Run a prompt chunk of at most `num_tokens` and a decode in block 0, which no request owns
        yet. A model that pools runs a prompt only. Sampling is greedy: the kernel that draws
        tokens may still be compiled."""
        faults: list[Fault] = []
        limits = self.parts.limits
        size = max(2, min(num_tokens, limits.max_positions))
        blocks = bytes(4 * -(-size // limits.block_size))
        for step_id, start, count in ((-2, 0, size - 1), (-1, size - 1, 1)):
            entry = StepEntry(RequestId(0), start, (0,) * count, blocks, SampleSpec(GREEDY))
            if self.parts.drafter is not None and count > 1:
                entry = entry._replace(proposal=ProposalSpec(1, 0))
            if limits.pooling is not None:
                entry = entry._replace(start=0, sample=None, pooling=PoolSpec())
            faults += self.run(Step(StepId(step_id), (entry,))).faults
        return faults
