"""Steps on a GPU are launched here and collected later, so that the GPU never waits for the host.

    host     launch k+1 │ collect k (wait for its copy) … launch k+2 …
    compute  ── k ──────┼── k+1 ──────────┼── k+2 ──
    to host      ids of k ─┘    ids of k+1 ─┘
    moves    KV of k ──────┴── KV of k+1 ──

The host submits a step's work to the streams and does not wait for it: sampled ids stay on the
device, where the next step reads them. Only a row whose sampling reads its own output (penalties, a
grammar) makes the host wait for the previous step, after this step's layers were submitted.

If launching a step raises, all submitted work is waited for first, so that no copy is in flight
when the step's blocks are reused; then the step fails with that error.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import WorkerLost
from engine.step import Step, StepResult, StepTimes
from engine.worker.cuda.sampling.last_tokens import DeviceLastTokens, LastTokensTensor
from engine.worker.cuda.step.forward import Forward
from engine.worker.cuda.step.kv_mover import DeviceMover
from engine.worker.launched import StepInFlight, StepOutcome
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import RaggedLayout
from engine.worker.sampling.logits_output import LogitsOutput
from engine.worker.sampling.outputs import OutputMemory
from engine.worker.streams import StreamEvent, Streams


class PendingStep(LastTokensTensor, Protocol):
    """The submitted work of a step that follows its layers."""

    def read(self) -> LogitsOutput:
        """The result; waits for its copies."""
        ...


class ReadsOutput(Protocol):
    """Submits what follows the layers of a step."""

    @property
    def samples(self) -> bool:
        """Whether this rank samples, and so reads the output of requests."""
        ...

    def begin(self, step: Step, layout: RaggedLayout, hidden: Tensor) -> PendingStep:
        """`hidden` `[sampled rows, then scored rows, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched step; `before` is the end of the previous step, None for the first."""

    step: Step
    began: StreamEvent
    ended: StreamEvent
    before: StreamEvent | None
    moved: StreamEvent | None
    pending: PendingStep | None  # None if the step reads no hidden states

    @property
    def may_wait(self) -> bool:
        return True

    def collect(self) -> StepOutcome:
        """Wait for the step and its moves; its result and times."""
        self.ended.wait()
        if self.moved is not None:
            self.moved.wait()
        output = LogitsOutput() if self.pending is None else self.pending.read()
        seconds = self.ended.seconds_since(self.began)
        idle = 0.0 if self.before is None else self.began.seconds_since(self.before)
        now = time.monotonic()
        result = StepResult(step_id=self.step.step_id, seconds=seconds, **output._asdict())
        return StepOutcome(result, StepTimes(None, now - seconds, now, max(0.0, idle)))


class StepLauncher:
    """Launches steps on the device of a model with one stage; each of its ranks has a launcher.

    A rank that fails once other ranks may wait for it raises `WorkerLost`, which ends all of them.
    """

    def __init__(
        self,
        streams: Streams,
        forward: Forward,
        reader: ReadsOutput,
        mover: DeviceMover,
        limits: LayoutLimits,
        *,
        has_ranks: bool = False,
    ) -> None:
        self._streams = streams
        self._forward = forward
        self._reader = reader
        self._mover = mover
        self._limits = limits
        self._has_ranks = has_ranks
        self._is_in_collective = False  # whether other ranks may wait for this one
        self._tokens = DeviceLastTokens()
        self._outputs = OutputMemory()
        self._before: StreamEvent | None = None  # the end of the last launched step

    def launch(self, step: Step) -> StepInFlight:
        """Submit the step. An exception fails this step; `WorkerLost` ends the worker."""
        try:
            with torch.inference_mode():
                return self._launch(step)
        except BaseException as error:
            if self._has_ranks and self._is_in_collective:
                raise WorkerLost(
                    f"step {step.step_id} failed while other ranks wait for this one: {error}"
                ) from error
            self._streams.synchronize()
            raise

    def _launch(self, step: Step) -> LaunchedStep:
        self._tokens.open(step)
        self._outputs.open(step)
        layout = build_layout(step, self._limits)
        source = self._tokens.source(step)
        moved = self._mover.launch(step.moves)
        began: list[StreamEvent] = []
        self._is_in_collective = True
        hidden = self._forward.run(layout, source, self._recording(began))
        pending = None
        if len(hidden):
            if self._reader.samples:
                step = self._outputs.complete(self._tokens.complete(step))
            pending = self._reader.begin(step, layout, hidden)
            self._tokens.keep(pending)
        self._is_in_collective = False
        before, ended = self._before, self._streams.compute.record(is_timed=True)
        self._before = ended
        return LaunchedStep(step, began[0], ended, before, moved, pending)

    def _recording(self, events: list[StreamEvent]) -> Callable[[], None]:
        return lambda: events.append(self._streams.compute.record(is_timed=True))
