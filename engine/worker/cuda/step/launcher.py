"""A step on a GPU: launched here, collected later, so that the next one is there when it ends.

    host     launch k+1 │ collect k (wait for its copy) … launch k+2 …
    compute  ── k ──────┼── k+1 ──────────┼── k+2 ──
    outward      ids of k ─┘    ids of k+1 ─┘
    moves    KV of k ──────┴── KV of k+1 ──

The host gives a step's work to the streams and never waits for what it has given: ids stay on the
device, where the next step takes them from. Only who reads the output to draw makes the host wait,
for the step before, and by then the layers of this one have been given.

A step that fails while it is launched answers for itself; first everything given is waited for,
so that nothing is still on its way when its blocks are used again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.step import Step, StepResult, StepTimes
from engine.worker.cuda.sampling.last_tokens import DeviceLastTokens
from engine.worker.cuda.sampling.logits_output import DeviceOutputReader, PendingOutput
from engine.worker.cuda.step.forward import Forward
from engine.worker.cuda.step.kv_mover import DeviceMover
from engine.worker.launched import Collected, Launched
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.sampling.logits_output import LogitsOutput
from engine.worker.streams import StreamEvent, Streams


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was launched; `before` is the end of the one before, None for the first."""

    step: Step
    began: StreamEvent
    ended: StreamEvent
    before: StreamEvent | None
    moved: StreamEvent | None
    pending: PendingOutput | None  # None where nothing is drawn or told

    @property
    def is_late(self) -> bool:
        return True

    def collect(self) -> Collected:
        """See `Launched`."""
        self.ended.wait()
        if self.moved is not None:
            self.moved.wait()
        reading = LogitsOutput() if self.pending is None else self.pending.read()
        seconds = self.ended.seconds_since(self.began)
        idle = 0.0 if self.before is None else self.began.seconds_since(self.before)
        now = time.monotonic()
        result = StepResult(step_id=self.step.step_id, seconds=seconds, **reading._asdict())
        return Collected(result, StepTimes(None, now - seconds, now, max(0.0, idle)))


class StepLauncher:
    """Launches steps on the device of a worker that is alone."""

    def __init__(
        self,
        streams: Streams,
        forward: Forward,
        reader: DeviceOutputReader,
        mover: DeviceMover,
        limits: LayoutLimits,
    ) -> None:
        self._streams = streams
        self._forward = forward
        self._reader = reader
        self._mover = mover
        self._limits = limits
        self._tokens = DeviceLastTokens()
        self._before: StreamEvent | None = None  # the end of the step launched last

    def launch(self, step: Step) -> Launched:
        """Give the step to the device. What it raises is the step's failure, but `WorkerLost`."""
        try:
            with torch.inference_mode():
                return self._launch(step)
        except BaseException:
            self._streams.settle()
            raise

    def _launch(self, step: Step) -> LaunchedStep:
        self._tokens.open(step)
        layout = build_layout(step, self._limits)
        source = self._tokens.source(step)
        moved = self._mover.launch(step.moves)
        began: list[StreamEvent] = []
        hidden = self._forward.run(layout, source, self._marking(began))
        pending = None
        if len(hidden):
            pending = self._reader.begin(self._tokens.complete(step), layout, hidden)
            self._tokens.keep(pending)
        before, ended = self._before, self._streams.compute.mark(is_timed=True)
        self._before = ended
        return LaunchedStep(step, began[0], ended, before, moved, pending)

    def _marking(self, events: list[StreamEvent]) -> Callable[[], None]:
        return lambda: events.append(self._streams.compute.mark(is_timed=True))
