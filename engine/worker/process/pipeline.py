"""The way of a step through a worker, on every device: `begin` submits it, `finish` collects it.

    begin    tokens of earlier steps ─ moves ─ masks ─ layers ─ logits, sampling ─ copy to the host
    finish   wait for the copies and moves ─ accept drafts ─ return tokens ─ propose drafts

On a CPU all work of `begin` is done when it returns, and `finish` follows at once. On a GPU the
next step is launched before the last one is collected, so that the GPU never waits for the host:

    host     launch k+1 │ collect k (wait for its copy) … launch k+2 …
    compute  ── k ──────┼── k+1 ──────────┼── k+2 ──
    to host      ids of k ─┘    ids of k+1 ─┘
    moves    KV of k ──────┴── KV of k+1 ──

Sampled ids stay on the device, where the next step reads them. Only a row whose sampling reads its
own output (penalties, a grammar) makes the host wait for the previous step, after this step's
layers were submitted.

If `begin` raises, all submitted work is waited for first, so that no copy is in flight when the
step's blocks are used again; then the step fails with that error.
"""

import threading
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StepFailed, WorkerLost
from engine.step import Step, StepEntry, StepId, StepResult, StepTimes
from engine.worker.launched import StepInFlight, StepOutcome
from engine.worker.model.kv.data_plane import ReceivedHidden
from engine.worker.model.layout import build_layout
from engine.worker.ports import MovesInFlight, RaggedLayout
from engine.worker.process.drafts.draft_rows import accept_drafts, last_tokens, split_drafts
from engine.worker.process.inbox import Inbox
from engine.worker.process.parts import WorkerParts
from engine.worker.process.token_return import TokenReturn
from engine.worker.sampling.constraints import MaskRequest
from engine.worker.sampling.last_tokens import NOTHING_CONTINUED, Continued, LastTokens
from engine.worker.sampling.logits_output import LogitsOutput, PendingOutput
from engine.worker.sampling.outputs import OutputMemory
from engine.worker.streams import StreamEvent


class Prepared(NamedTuple):
    """The part of a step that is done before computing."""

    layout: RaggedLayout
    received: ReceivedHidden | None  # None on the first stage


class _Slices(NamedTuple):
    """The slices of images in a step, and the images that failed."""

    began: StreamEvent
    ended: StreamEvent
    failed: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step between `begin` and `finish`."""

    pipeline: "StepPipeline"
    step: Step  # with the tokens that the host knew
    continued: Continued
    prepared: Prepared | None  # None for a step without entries
    moving: MovesInFlight
    began: StreamEvent
    ended: StreamEvent
    before: StreamEvent | None  # the end of the previous step on a device that works ahead
    pending: PendingOutput | None  # None if this worker reads no hidden states of the step
    hidden: Tensor | None  # all rows' hidden states, if drafts are proposed from them
    slices: _Slices | None = None

    @property
    def may_wait(self) -> bool:
        return self.pipeline.is_async

    def collect(self) -> StepOutcome:
        return self.pipeline.finish(self)

    @property
    def seconds_before(self) -> float:
        """Compute time in earlier stages."""
        received = self.prepared and self.prepared.received
        return received.seconds if received else 0.0


class _Computed(NamedTuple):
    """What the layers of the last stage return."""

    read: Tensor  # the hidden states of the layout's sampled rows, then its scored or pooled rows
    every: Tensor | None  # all rows' hidden states, if drafts are proposed from them


class StepPipeline:
    """Runs steps on the parts of a worker. Steps begin and finish in order; `finish` may be called
    in another thread."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._shard = parts.shard
        self._transfers = parts.device.transfers()
        self._tokens = LastTokens(num_steps=parts.placement.num_stages)
        self._return = TokenReturn(parts.placement, parts.token_plane, self._tokens)
        self._outputs = OutputMemory()
        self._inbox = Inbox(self._prepare)
        self._computing = threading.Lock()  # proposals and layers are submitted one after the other
        self._before: StreamEvent | None = None
        self._owes_step = False  # whether the next stage waits for the current step
        self._is_in_collective = False  # whether other ranks may wait for this one
        self.times = StepTimes(None, 0.0, 0.0)  # the times of the step launched last

    @property
    def is_async(self) -> bool:
        """Whether a step may still be under way when `begin` has returned."""
        return self._transfers.is_async

    def learn(self, step: Step) -> None:
        """Start preparing a step before it runs; may be called in another thread than `begin`."""
        if not step.entries:
            return
        if self._shard.is_first:
            self._inbox.prepare(step)
        else:
            self._inbox.put(step)

    def begin(self, step: Step) -> StepInFlight:
        """Submit the step. An exception fails this step; `WorkerLost` ends the worker."""
        try:
            with self._computing, torch.inference_mode():
                return self._begin(step) if step.entries else self._begin_moves(step)
        except Exception as error:
            self._rest()
            if self._is_in_collective and self._shard.num_ranks > 1:
                raise WorkerLost(
                    f"step {step.step_id} failed while other ranks wait for this one: {error}"
                ) from error
            self._is_in_collective = False
            self._parts.device.check()
            raise

    def abandon(self, step: Step, line: str) -> None:
        """After `begin` raised: send the reason to the next stage, if it waits for the step."""
        if self._owes_step:
            nothing = self._parts.device.memory.zeros(step.num_tokens, self._shard.sent_width)
            self._send_on(step.step_id, nothing, 0.0, line)
        self._return.send(step, ())

    def finish(self, launched: LaunchedStep) -> StepOutcome:
        """Wait for the step; its result and times. An exception fails this step only."""
        try:
            return self._finish(launched)
        except WorkerLost:
            raise
        except Exception:
            self._return.send(launched.step, ())
            self._parts.device.check()
            raise
        finally:
            self._rest()

    def logits(self, step: Step) -> Tensor | None:
        """Compute one step without sampling: logits `[entries that sample, vocab]` in float32.

        None except on rank 0 of the last stage.
        """
        prepared = self._take(step)
        with torch.inference_mode(), self._parts.device.pool.awake():
            computed = self._compute(step, prepared, NOTHING_CONTINUED)
            if computed is None:
                return None
            logits = self._parts.stage.head(computed.read[: len(prepared.layout.sampled_rows)])
            return None if logits is None else logits.clone()  # the next step may overwrite them

    def _begin_moves(self, step: Step) -> StepInFlight:
        """Begin a step without entries."""
        began = self._transfers.mark()
        self._set_times(None)
        slices = self._encode(step)
        moving = self._parts.mover.move(step.moves)
        ended = began if slices is None else slices.ended
        return LaunchedStep(
            self,
            step,
            NOTHING_CONTINUED,
            None,
            moving,
            began,
            ended,
            None,
            None,
            None,
            slices,
        )

    def _encode(self, step: Step) -> _Slices | None:
        """Forget and encode images as the step says."""
        if not step.encodes:
            if step.dropped:
                self._parts.images.run(step)
            return None
        self._parts.device.pool.wake()
        began = self._transfers.mark()
        failed = self._parts.images.run(step)
        return _Slices(began, self._transfers.mark(), failed)

    def _begin(self, step: Step) -> StepInFlight:
        self._tokens.open(step)
        self._outputs.open(step)
        prepared = self._take(step)
        began = self._transfers.mark()
        self._return.expect(step)
        continued = self._tokens.continued(step)
        self._parts.device.pool.wake()
        slices = self._encode(step)
        moving = self._parts.mover.move(step.moves)
        reader, rows, masks = self._parts.reader, None, MaskRequest()
        if continued.is_known:
            layout, step = prepared.layout, continued.complete(step)
            layout.token_ids[layout.last_token_rows] = continued.tokens()
            continued, rows = NOTHING_CONTINUED, self._completed(step)
            masks = masks if reader is None else reader.prepare(rows)
        computed = self._compute(step, prepared, continued)
        pending = None
        if computed is not None and reader is not None:
            if rows is None:
                rows = self._completed(self._with_tokens(step, continued))
                masks = reader.prepare(rows)
            self._is_in_collective = reader.has_collectives(prepared.layout)
            pending = reader.begin(rows, prepared.layout, computed.read, masks)
            self._is_in_collective = False
            self._tokens.keep(pending)
        before, ended = self._before, self._transfers.mark()
        self._before = ended if self.is_async else None
        every = None if computed is None else computed.every
        return LaunchedStep(
            self,
            step,
            continued,
            prepared,
            moving,
            began,
            ended,
            before,
            pending,
            every,
            slices,
        )

    def _with_tokens(self, step: Step, continued: Continued) -> Step:
        """The step with the tokens of its predecessor, if its sampling reads them on the host."""
        reader = self._parts.reader
        assert reader is not None, "the last stage"
        if reader.reads_tokens and any(map(_reads_output, step.entries)):
            return continued.complete(step)
        return step

    def _completed(self, step: Step) -> Step:
        """A row for each token that is sampled, with the output that its sampling reads."""
        reader = self._parts.reader
        if reader is not None and reader.reads_tokens:
            step = self._outputs.complete(step)
        return split_drafts(step)

    def _prepare(self, step: Step) -> Prepared:
        """Build the layout, and wait for the hidden states of the previous stage."""
        layout = build_layout(split_drafts(step), self._parts.limits)
        if self._shard.is_first:
            return Prepared(layout, None)
        plane, width = self._parts.plane, self._shard.received_width
        assert plane is not None, "the only stage sends and receives nothing"
        self._parts.device.enter_thread()
        return Prepared(layout, plane.receive(step.step_id, layout.num_tokens, width))

    def _take(self, step: Step) -> Prepared:
        """The prepared step; from here on the next stage waits for it."""
        self._owes_step = False
        prepared = self._inbox.take(step)
        self._owes_step = not self._shard.is_last
        self._is_in_collective = True
        self._set_times(prepared.received)
        return prepared

    def _set_times(self, received: ReceivedHidden | None) -> None:
        now = time.monotonic()
        self.times = StepTimes(None if received is None else received.at, now, now)

    def _compute(self, step: Step, prepared: Prepared, continued: Continued) -> _Computed | None:
        """The hidden states to compute logits from; None except on the last stage."""
        layout, received = prepared
        if received is not None and received.fault:
            raise StepFailed(received.fault)
        if received is not None:
            received.synchronize()
        hidden = None if received is None else received.hidden
        stage, drafter = self._parts.stage, self._parts.drafter
        computed = None
        if not self._shard.is_last:
            seconds = 0.0 if received is None else received.seconds
            hidden = stage.run(layout, hidden, continued)
            self._send_on(step.step_id, hidden, seconds + time.monotonic() - self.times.began_at)
        elif drafter is not None and drafter.reads_hidden:
            computed = _Computed(*stage.read_all(layout, hidden, continued))
        else:
            computed = _Computed(stage.read(layout, hidden, continued), None)
        self._is_in_collective = False
        return computed

    def _send_on(self, step_id: StepId, hidden: Tensor, seconds: float, fault: str = "") -> None:
        assert self._parts.plane is not None, "the only stage sends and receives nothing"
        self._parts.plane.send(step_id, hidden, seconds, fault)
        self._owes_step = False

    def _finish(self, launched: LaunchedStep) -> StepOutcome:
        self._parts.device.enter_thread()
        step = launched.step
        launched.ended.wait()
        unread = launched.moving.wait()
        if launched.prepared is None:
            self._parts.kept.wait()
        output = LogitsOutput() if launched.pending is None else launched.pending.read()
        if output.tokens:
            output = accept_drafts(step, output)
        self._return.send(step, last_tokens(step, output))
        # What the host does behind the event is part of a step of the host
        ended = launched.ended if self.is_async else self._transfers.mark()
        own = ended.seconds_since(launched.began)
        idle = 0.0 if launched.before is None else launched.began.seconds_since(launched.before)
        proposals, proposal_seconds = self._propose(launched, output)
        seconds, now = own + proposal_seconds, time.monotonic()
        received, slices = launched.prepared and launched.prepared.received, launched.slices
        data_at = received.at if received else None
        result = StepResult(
            step_id=step.step_id,
            seconds=launched.seconds_before + seconds,
            unread=unread,
            proposals=proposals,
            proposal_seconds=proposal_seconds if proposals else 0.0,
            encoder_seconds=slices.ended.seconds_since(slices.began) if slices else 0.0,
            failed_images=slices.failed if slices else (),
            **output._asdict(),
        )
        return StepOutcome(result, StepTimes(data_at, now - seconds, now, max(0.0, idle)))

    def _propose(
        self, launched: LaunchedStep, output: LogitsOutput
    ) -> tuple[tuple[tuple[int, ...], ...], float]:
        """Proposals for the next step, and the seconds that they took."""
        drafter = self._parts.drafter
        if drafter is None or launched.prepared is None:
            return (), 0.0
        began = time.monotonic()
        with self._computing:
            step = launched.continued.complete(launched.step)
            proposals = drafter.propose(step, output, launched.hidden)
        return proposals, time.monotonic() - began

    def _rest(self) -> None:
        """Let threads sleep that help this one compute, if no step is ready."""
        if not self._inbox.has_next:
            self._parts.device.pool.rest()


def _reads_output(entry: StepEntry) -> bool:
    """Whether the entry's sampling reads the output so far."""
    return entry.sample is not None and entry.sample.reads_output
