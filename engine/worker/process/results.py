"""Steps are answered in the order of their launch, without holding up the launch of the next.

    launch k ── launch k+1 ── launch k+2      the thread that runs the worker
         └─ collect k, send ── collect k+1    a thread of its own, from the first late step on

A worker that computes while it launches never needs the thread.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from engine.errors import StepFailed, WorkerLost
from engine.step import Step, StepId, StepTimes
from engine.transport.wire import StepFailure, StepRan, TraceEvents, frame
from engine.worker.launched import Launched

logger = logging.getLogger("engine.worker")

MAX_LINE_LEN = 500


class StepOrder(NamedTuple):
    """A step as this worker learned of it."""

    step: Step
    learned_at: float  # CLOCK_MONOTONIC


class Failure(NamedTuple):
    """Why a step was not launched, or never came back, and when that was."""

    line: str
    times: StepTimes


class ResultSender:
    """Sends what comes of each order, or of some of them only what a trace wants to know."""

    def __init__(
        self,
        send: Callable[[bytearray], None],
        on_end: Callable[[Exception], None],
        *,
        answers: bool,
        traces: bool,
    ) -> None:
        """`on_end` hears what ended the thread, such as `WorkerLost`; nothing is sent after."""
        self._send = send
        self._on_end = on_end
        self._answers = answers
        self._traces = traces
        self._queue: SimpleQueue[tuple[StepOrder, Launched | Failure] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: Exception | None = None  # what ended the thread

    def put(self, order: StepOrder, launched: Launched | Failure) -> None:
        """Answer now, or after those that are late; raises what sending and collecting raise."""
        if self._thread is None and (isinstance(launched, Failure) or not launched.is_late):
            self._answer(order, launched)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="podway-answers", daemon=True)
            self._thread.start()
        self._queue.put((order, launched))

    def finish(self) -> None:
        """Return when all is answered that was put, or raise what ended the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        if self._ended is not None:
            raise self._ended

    def _run(self) -> None:
        try:
            while (found := self._queue.get()) is not None:
                self._answer(*found)
        except Exception as error:  # the doorway of this thread: it is raised in the other
            self._ended = error
            self._on_end(error)

    def _answer(self, order: StepOrder, launched: Launched | Failure) -> None:
        step_id = order.step.step_id
        message, times = _collect(step_id, launched)
        if self._answers:
            self._send(message)
        if self._traces:
            self._send(frame(TraceEvents(step_id, order.learned_at, times)))


def line_of(error: Exception, step_id: StepId) -> str:
    """What a step's failure says; the log of this worker hears more, if it began here."""
    if isinstance(error, StepFailed):  # at a stage before, which has told its log
        return one_line(str(error))
    logger.error("step %d failed", step_id, exc_info=error)
    return describe(error)


def describe(error: Exception) -> str:
    """An error on one line, with its kind."""
    return one_line(f"{type(error).__name__}: {error}")


def one_line(text: str) -> str:
    """The text without line breaks, cut where nobody reads on."""
    return " ".join(text.split())[:MAX_LINE_LEN]


def _collect(step_id: StepId, launched: Launched | Failure) -> tuple[bytearray, StepTimes]:
    """The frame to answer with; what is raised, but `WorkerLost`, is the step's failure."""
    if isinstance(launched, Failure):
        return frame(StepFailure(step_id, launched.line)), launched.times
    now = time.monotonic()
    times = StepTimes(None, now, now)
    try:
        result, times = launched.collect()
        return frame(StepRan(result)), times
    except WorkerLost:
        raise
    except Exception as error:  # a doorway: the step has failed, and the next one runs
        return frame(StepFailure(step_id, line_of(error, step_id))), times
