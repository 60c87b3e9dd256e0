"""A worker: the layers of a stage, or a rank's part of them, and how steps run on them."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError, StepFailed, WorkerLost
from engine.lora import LoraReport, LoraSpec
from engine.pooling import PoolSpec
from engine.step import (
    Fault,
    ProposalSpec,
    ReadAhead,
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
from engine.worker.launched import CompletedStep, StepInFlight, StepOutcome
from engine.worker.lora.model import LoraLinear
from engine.worker.model.kv.data_plane import ReceivedHidden
from engine.worker.model.last_tokens import LastTokens
from engine.worker.model.layout import build_layout
from engine.worker.ports import RaggedLayout
from engine.worker.process.build import WorkerParts, build_worker
from engine.worker.process.drafts.draft_rows import accept_drafts, last_tokens, split_drafts
from engine.worker.process.drafts.mtp_head import MtpHead
from engine.worker.process.inbox import Inbox
from engine.worker.process.token_return import TokenReturn
from engine.worker.sampling.constraints import MaskRequest
from engine.worker.sampling.logits_output import LogitsOutput, OutputReader
from engine.worker.sampling.outputs import OutputMemory
from engine.worker_settings import WorkerSettings

WARM_UP_TOKENS = 64


class Prepared(NamedTuple):
    """The part of a step that is done before computing."""

    layout: RaggedLayout
    received: ReceivedHidden | None  # None on the first stage


class Worker:
    """Holds a shard of a model and runs steps on it, one at a time."""

    def __init__(self, parts: WorkerParts) -> None:
        self.report = parts.report
        self._stage = parts.stage
        self._pooler = parts.pooler
        self._reader = OutputReader(parts.stage.head, parts.sampler, parts.constraints)
        self._mover = parts.mover
        self._kept = parts.kept
        self._launcher = parts.launcher
        self._loras = parts.loras
        self._device = parts.device
        self._limits = parts.limits
        self._shard = parts.shard
        self._plane = parts.plane
        self._held = LastTokens(num_steps=parts.placement.num_stages)
        self._return = TokenReturn(parts.placement, parts.plane, self._held, parts.lookahead)
        self._outputs = OutputMemory()
        self._draft = parts.draft
        self._keep = parts.draft.keep if isinstance(parts.draft, MtpHead) else None
        self._inbox = Inbox(self._prepare)
        self._owes_step = False  # whether the next stage waits for the current step
        self._is_in_collective = False  # whether other ranks may wait for this one
        self.times = StepTimes(None, 0.0, 0.0)  # of the step launched last

    @classmethod
    def load(
        cls, settings: WorkerSettings, progress: Progress, device: Device | None = None
    ) -> "Worker":
        """Build a worker and run two warm-up steps; raises `StartupError`."""
        parts = build_worker(settings, progress, device)
        worker = cls(parts)
        if faults := worker._run_first_steps(worker._limits.block_size):
            raise StartupError(f"{settings.model} cannot be served: {faults[0].message}")
        return worker

    def load_lora(self, spec: LoraSpec) -> LoraReport:
        """Load a LoRA adapter beside the steps; the report has the error if that fails."""
        self._device.enter_thread()
        return self._loras.load(spec)

    def read_ahead(self, copies: ReadAhead) -> None:
        """Begin to read copies in the disk tier that a waiting request will load."""
        self._kept.read_ahead(copies)

    @property
    def lora_linears(self) -> Sequence[LoraLinear]:
        """The linears of this worker that adapters can change."""
        return self._loras.linears

    def unload_lora(self, lora_id: int) -> None:
        """Free a LoRA adapter that no step will use any more."""
        self._device.enter_thread()
        self._loras.unload(lora_id)

    def learn(self, step: Step) -> None:
        """Start preparing a step before it runs; may be called in another thread than `launch`."""
        if not step.entries or self._launcher is not None:
            return
        if self._shard.is_first:
            self._inbox.prepare(step)
        else:
            self._inbox.put(step)

    def launch(self, step: Step) -> StepInFlight:
        """Launch a step. After any error but `WorkerLost`, the next step can be launched.

        Without a launcher, the step is computed before this returns.
        """
        if not step.entries:
            return CompletedStep(StepOutcome(self._make_moves(step), self.times))
        if self._launcher is not None:
            now = time.monotonic()
            self.times = StepTimes(None, now, now)
            return self._launcher.launch(step)
        try:
            result = self._run(step)
        finally:
            if not self._inbox.has_next:
                self._device.rest()
        return CompletedStep(StepOutcome(result, self.times))

    def run(self, step: Step) -> StepResult:
        """Compute one step. After any error but `WorkerLost`, the next step can run.

        Only rank 0 of the last stage returns tokens; `seconds` includes all earlier stages.
        """
        return self.launch(step).collect().result

    def _make_moves(self, step: Step) -> StepResult:
        """Run a step without entries; copies to the disk are written when this returns."""
        began = time.monotonic()
        with torch.inference_mode(), self._mover.moving(step.moves) as unread:
            pass
        self._kept.wait()
        ended = time.monotonic()
        self.times = StepTimes(None, began, ended)
        return StepResult(
            step.step_id, (), ended - began, unread=unread.blocks, unread_states=unread.states
        )

    def _run(self, step: Step) -> StepResult:
        self._held.open(step)
        self._outputs.open(step)
        prepared = self._take(step)
        self._return.expect(step)
        step = self._held.complete(step, prepared.layout)
        self._device.wake()
        with torch.inference_mode(), self._mover.moving(step.moves) as unread:
            if self._samples:
                step = self._outputs.complete(step)
            rows = split_drafts(step)
            masks = self._reader.begin(rows) if self._samples else MaskRequest()
            hidden = self._compute(step, prepared)
            output = LogitsOutput()
            if hidden is not None and self._pooler is not None:
                output = self._pooler.read(rows, prepared.layout, hidden)
            elif hidden is not None:
                output = self._read(rows, prepared.layout, hidden, masks)
        if output.tokens:
            output = accept_drafts(step, output)
        last = last_tokens(step, output)
        self._held.keep(step, last, output.faults)
        self._return.send(last)
        drafting_at = time.monotonic()
        proposals: tuple[tuple[int, ...], ...] = ()
        if self._draft is not None:
            proposals = self._draft.propose(step, output)
        seconds = self._seconds(prepared)
        self.times = self.times._replace(ended_at=time.monotonic())
        return StepResult(
            step_id=step.step_id,
            seconds=seconds,
            unread=unread.blocks,
            unread_states=unread.states,
            proposals=proposals,
            proposal_seconds=self.times.ended_at - drafting_at if proposals else 0.0,
            **output._asdict(),
        )

    def logits(self, step: Step) -> Tensor | None:
        """Compute one step without sampling: logits `[entries that sample, vocab]` in float32.

        None except on rank 0 of the last stage.
        """
        prepared = self._take(step)
        with torch.inference_mode(), self._device.awake():
            hidden = self._compute(step, prepared)
            if hidden is None:
                return None
            logits = self._stage.head(hidden[: len(prepared.layout.sampled_rows)])
            return None if logits is None else logits.clone()  # the next step may overwrite them

    def abandon(self, step: Step, line: str) -> None:
        """After `launch` raised: send the reason to the next stage, if it waits for the step.

        Raises `WorkerLost` if other ranks of this stage may still wait for this one, or if the
        device can compute nothing more.
        """
        self._device.check()
        if self._is_in_collective and self._shard.num_ranks > 1:
            raise WorkerLost(
                f"step {step.step_id} failed while other ranks wait for this one: {line}"
            )
        self._is_in_collective = False
        if self._owes_step:
            nothing = self._device.zeros(step.num_tokens, self._shard.sent_width)
            self._send_on(step.step_id, nothing, 0.0, line)
        self._return.send(())

    def _prepare(self, step: Step) -> Prepared:
        """Build the layout, and wait for the hidden states of the previous stage."""
        layout = build_layout(split_drafts(step), self._limits)
        if self._shard.is_first:
            return Prepared(layout, None)
        assert self._plane is not None, "the only stage sends and receives nothing"
        self._device.enter_thread()
        width = self._shard.received_width
        return Prepared(layout, self._plane.receive(step.step_id, layout.num_tokens, width))

    def _take(self, step: Step) -> Prepared:
        """The prepared step; from here on the next stage waits for it."""
        self._owes_step = False
        prepared = self._inbox.take(step)
        self._owes_step = not self._shard.is_last
        self._is_in_collective = True
        data_at, now = prepared.received and prepared.received.at, time.monotonic()
        self.times = StepTimes(data_at, now, now)
        return prepared

    def _compute(self, step: Step, prepared: Prepared) -> Tensor | None:
        """The hidden states to compute logits from; None except on the last stage."""
        layout, received = prepared
        if received is not None and received.fault:
            raise StepFailed(received.fault)
        if received is not None:
            received.synchronize()
        hidden = None if received is None else received.hidden
        if self._shard.is_last:
            hidden = self._stage.read(layout, hidden, self._keep)
        else:
            hidden = self._stage.run(layout, hidden)
            self._send_on(step.step_id, hidden, self._seconds(prepared))
            hidden = None
        self._is_in_collective = False
        return hidden

    def _send_on(self, step_id: StepId, hidden: Tensor, seconds: float, fault: str = "") -> None:
        assert self._plane is not None, "the only stage sends and receives nothing"
        self._plane.send(step_id, hidden, seconds, fault)
        self._owes_step = False

    def _seconds(self, prepared: Prepared) -> float:
        """Compute time of a step in all stages so far."""
        before = 0.0 if prepared.received is None else prepared.received.seconds
        return before + time.monotonic() - self.times.began_at

    @property
    def _samples(self) -> bool:
        """Whether this worker samples the tokens."""
        return self._shard.is_last and self._shard.rank == 0

    def _read(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, masks: MaskRequest
    ) -> LogitsOutput:
        """The output of a step on rank 0 of the last stage; other ranks compute their part of the
        logits."""
        if self._shard.rank == 0:
            self._is_in_collective = (
                len(layout.scored_rows) > 0
            )  # then there are several collectives
            output = self._reader.read(step, layout, hidden, masks)
            self._is_in_collective = False
            return output
        self._reader.follow(layout, hidden)
        return LogitsOutput()

    def warm_up(self) -> None:
        """Run a prompt whose buffers and code are in memory then, before the first request; not
        beside other workers or on a GPU. `WorkerLost` if the device can compute nothing right."""
        self._device.check()
        if self._plane is None and self._launcher is None:
            self._run_first_steps(WARM_UP_TOKENS)

    def _run_first_steps(self, num_tokens: int) -> list[Fault]:
        """Run a prompt chunk of at most `num_tokens` and a decode in block 0, which no request owns
        yet. A model that pools runs a prompt only."""
        faults: list[Fault] = []
        size = max(2, min(num_tokens, self._limits.max_positions))
        blocks = bytes(4 * -(-size // self._limits.block_size))
        for step_id, start, count in ((-2, 0, size - 1), (-1, size - 1, 1)):
            entry = StepEntry(
                RequestId(0), start, (0,) * count, blocks, SampleSpec(SamplingParams())
            )
            if self._draft is not None and count > 1:
                entry = entry._replace(proposal=ProposalSpec(1, 0))
            if self._pooler is not None:
                entry = entry._replace(start=0, sample=None, pooling=PoolSpec())
            faults += self.run(Step(StepId(step_id), (entry,))).faults
        return faults
