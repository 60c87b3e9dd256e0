"""One worker: the layers of a stage, or a rank's part of them, and what runs steps on them."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError, StepFailed, WorkerLost
from engine.step import (
    Fault,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
    StepResult,
    StepTimes,
    WorkerSettings,
)
from engine.worker.device import Device, Progress
from engine.worker.launched import Collected, Done, Launched
from engine.worker.model.data_plane import Handed
from engine.worker.model.last_tokens import LastTokens
from engine.worker.model.layout import build_layout
from engine.worker.ports import RaggedLayout
from engine.worker.process.build import Parts, make_parts
from engine.worker.process.inbox import Inbox
from engine.worker.process.token_return import TokenReturn
from engine.worker.sampling.constraints import MaskRequest
from engine.worker.sampling.logits_output import LogitsOutput, OutputReader
from engine.worker.sampling.outputs import OutputMemory


class Prepared(NamedTuple):
    """A step as far as it gets without computing."""

    layout: RaggedLayout
    handed: Handed | None  # None on the first stage


class Worker:
    """Holds a shard of a model and runs steps on it, one at a time."""

    def __init__(self, parts: Parts) -> None:
        self.report = parts.report
        self._stage = parts.stage
        self._reader = OutputReader(parts.stage.head, parts.sampler, parts.constraints)
        self._mover = parts.mover
        self._launcher = parts.launcher
        self._device = parts.device
        self._limits = parts.limits
        self._shard = parts.shard
        self._plane = parts.plane
        self._held = LastTokens(num_steps=parts.placement.num_stages)
        self._return = TokenReturn(parts.placement, parts.plane, self._held, parts.lookahead)
        self._outputs = OutputMemory()
        self._inbox = Inbox(self._prepare)
        self._owes = False  # the next stage the step that runs
        self._is_amid = False  # in a step, where ranks wait for each other
        self.times = StepTimes(None, 0.0, 0.0)  # of the step launched last

    @classmethod
    def load(
        cls, settings: WorkerSettings, progress: Progress, device: Device | None = None
    ) -> "Worker":
        """A worker that has run once to warm up; see `make_parts`."""
        parts = make_parts(settings, progress, device)
        worker = cls(parts)
        parts.constraints.wait_until_open()
        if faults := worker._warm_up():
            raise StartupError(f"{settings.model} cannot be served: {faults[0].message}")
        return worker

    def learn(self, step: Step) -> None:
        """Hear of a step before it is run; another thread than the one that runs may call this."""
        if not self._shard.is_first:
            self._inbox.put(step)

    def launch(self, step: Step) -> Launched:
        """Begin with a step; whatever is raised but `WorkerLost`, the next step can be launched.

        Without a launcher it has been computed on return.
        """
        if self._launcher is not None:
            now = time.monotonic()
            self.times = StepTimes(None, now, now)
            return self._launcher.launch(step)
        result = self._run(step)
        return Done(Collected(result, self.times))

    def run(self, step: Step) -> StepResult:
        """Compute one step. Whatever it raises but `WorkerLost`, the next step can run.

        Tokens come from rank 0 of the last stage only; `seconds` are those of all stages so far.
        """
        return self.launch(step).collect().result

    def _run(self, step: Step) -> StepResult:
        self._held.open(step)
        prepared = self._take(step)
        self._return.expect(step)
        step = self._held.complete(step, prepared.layout)
        with torch.inference_mode(), self._device.awake(), self._mover.moving(step.moves):
            if self._draws:
                step = self._outputs.complete(step)
            wanted = self._reader.begin(step) if self._draws else MaskRequest()
            hidden = self._compute(step, prepared)
            reading = LogitsOutput()
            if hidden is not None:
                reading = self._read(step, prepared.layout, hidden, wanted)
        self._held.keep(step, reading.tokens, reading.faults)
        self._return.send(reading.tokens)
        seconds = self._seconds(prepared)
        self.times = self.times._replace(ended_at=time.monotonic())
        return StepResult(step_id=step.step_id, seconds=seconds, **reading._asdict())

    def logits(self, step: Step) -> Tensor | None:
        """Compute one step but draw nothing: `[entries with a draw, vocab]` in float32.

        None but on rank 0 of the last stage.
        """
        prepared = self._take(step)
        with torch.inference_mode(), self._device.awake():
            hidden = self._compute(step, prepared)
            if hidden is None:
                return None
            return self._stage.head(hidden[: len(prepared.layout.sampled_rows)])

    def abandon(self, step: Step, line: str) -> None:
        """After `run` raised: tell the next stage, if it waits for the step, why it failed.

        Raises `WorkerLost` where other ranks of this stage may still wait for this one.
        """
        if self._is_amid and self._shard.num_ranks > 1:
            raise WorkerLost(f"it left its stage in the middle of step {step.step_id}: {line}")
        self._is_amid = False
        if self._owes:
            nothing = self._device.zeros(step.num_tokens, self._shard.shape.hidden_size)
            self._hand_on(step.step_id, nothing, 0.0, line)
        self._return.send(())

    def _prepare(self, step: Step) -> Prepared:
        """What needs no computing: the layout, and the wait for the stage before."""
        layout = build_layout(step, self._limits)
        if self._shard.is_first:
            return Prepared(layout, None)
        assert self._plane is not None, "a stage that stands alone"
        hidden_size = self._shard.shape.hidden_size
        return Prepared(layout, self._plane.receive(step.step_id, layout.num_tokens, hidden_size))

    def _take(self, step: Step) -> Prepared:
        """The step prepared; from here on the next stage counts on it."""
        self._owes = False
        prepared = self._inbox.take(step)
        self._owes = not self._shard.is_last
        self._is_amid = True
        data_at, now = prepared.handed and prepared.handed.at, time.monotonic()
        self.times = StepTimes(data_at, now, now)
        return prepared

    def _compute(self, step: Step, prepared: Prepared) -> Tensor | None:
        """On the last stage, the hidden states to read from; elsewhere they are handed on."""
        layout, handed = prepared
        if handed is not None and handed.fault:
            raise StepFailed(handed.fault)
        if handed is not None:
            handed.settle()
        hidden = None if handed is None else handed.hidden
        if self._shard.is_last:
            hidden = self._stage.read(layout, hidden)
        else:
            hidden = self._stage.run(layout, hidden)
            self._hand_on(step.step_id, hidden, self._seconds(prepared))
            hidden = None
        self._is_amid = False
        return hidden

    def _hand_on(self, step_id: StepId, hidden: Tensor, seconds: float, fault: str = "") -> None:
        assert self._plane is not None, "a stage that stands alone"
        self._plane.send(step_id, hidden, seconds, fault)
        self._owes = False

    def _seconds(self, prepared: Prepared) -> float:
        """Spent on a step by all stages up to now."""
        before = 0.0 if prepared.handed is None else prepared.handed.seconds
        return before + time.monotonic() - self.times.began_at

    @property
    def _draws(self) -> bool:
        """Whether tokens come from this worker."""
        return self._shard.is_last and self._shard.rank == 0

    def _read(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, wanted: MaskRequest
    ) -> LogitsOutput:
        """What rank 0 of the last stage answers; the others help with the logits."""
        if self._shard.rank == 0:
            self._is_amid = len(layout.scored_rows) > 0  # then others wait for more than one head
            reading = self._reader.read(step, layout, hidden, wanted)
            self._is_amid = False
            return reading
        self._reader.follow(layout, hidden)
        return LogitsOutput()

    def _warm_up(self) -> list[Fault]:
        """Run a piece of a prompt and a decode in block 0, which nobody owns yet."""
        faults: list[Fault] = []
        size = min(self._limits.block_size, self._limits.max_positions)
        block = bytes(4)
        for step_id, start, count in ((-2, 0, max(1, size - 1)), (-1, size - 1, 1)):
            entry = StepEntry(
                RequestId(0), start, (0,) * count, block, SampleSpec(SamplingParams())
            )
            faults += self.run(Step(StepId(step_id), (entry,))).faults
        return faults
