"""Sends the results of steps in the order of launch, without delaying the next launch.

    launch k ── launch k+1 ── launch k+2      the thread that runs the worker
         └─ collect k, send ── collect k+1    a second thread, from the first step that may wait

A worker that computes while it launches never starts the second thread.
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
from engine.worker.launched import StepInFlight

logger = logging.getLogger("engine.worker")

MAX_LINE_LEN = 500


class ReceivedStep(NamedTuple):
    """A step, and when this worker received it."""

    step: Step
    received_at: float  # CLOCK_MONOTONIC


class Failure(NamedTuple):
    """Why a step could not be launched, and when."""

    line: str
    times: StepTimes


class ResultSender:
    """Sends the outcome of each step: its result if this worker `answers`, its times if it
    `traces`."""

    def __init__(
        self,
        send: Callable[[bytearray], None],
        on_end: Callable[[Exception], None],
        *,
        answers: bool,
        traces: bool,
    ) -> None:
        """`on_end` is called with the error that ends the thread, such as `WorkerLost`."""
        self._send = send
        self._on_end = on_end
        self._answers = answers
        self._traces = traces
        self._queue: SimpleQueue[tuple[ReceivedStep, StepInFlight | Failure] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended: Exception | None = None  # what ended the thread

    def put(self, order: ReceivedStep, launched: StepInFlight | Failure) -> None:
        """Send the outcome now or in the second thread. Raises errors of `collect` and `send`."""
        if self._thread is None and (isinstance(launched, Failure) or not launched.may_wait):
            self._answer(order, launched)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="podway-answers", daemon=True)
            self._thread.start()
        self._queue.put((order, launched))

    def finish(self) -> None:
        """Wait until all outcomes are sent, or raise the error that ended the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        if self._ended is not None:
            raise self._ended

    def _run(self) -> None:
        try:
            while (found := self._queue.get()) is not None:
                self._answer(*found)
        except Exception as error:  # raised in the other thread
            self._ended = error
            self._on_end(error)

    def _answer(self, order: ReceivedStep, launched: StepInFlight | Failure) -> None:
        step_id = order.step.step_id
        message, times = _collect(step_id, launched)
        if self._answers:
            self._send(message)
        if self._traces:
            self._send(frame(TraceEvents(step_id, order.received_at, times)))


def line_of(error: Exception, step_id: StepId) -> str:
    """The message of a failed step; the traceback is logged if the step failed in this worker."""
    if isinstance(error, StepFailed):  # in an earlier stage, which has logged it
        return one_line(str(error))
    logger.error("step %d failed", step_id, exc_info=error)
    return describe(error)


def describe(error: Exception) -> str:
    """An error on one line, with its kind."""
    return one_line(f"{type(error).__name__}: {error}")


def one_line(text: str) -> str:
    """The text without line breaks, cut to `MAX_LINE_LEN`."""
    return " ".join(text.split())[:MAX_LINE_LEN]


def _collect(step_id: StepId, launched: StepInFlight | Failure) -> tuple[bytearray, StepTimes]:
    """The frame to send, and the step's times. Any error but `WorkerLost` fails the step."""
    if isinstance(launched, Failure):
        return frame(StepFailure(step_id, launched.line)), launched.times
    now = time.monotonic()
    times = StepTimes(None, now, now)
    try:
        result, times = launched.collect()
        return frame(StepRan(result)), times
    except WorkerLost:
        raise
    except Exception as error:  # only this step fails
        return frame(StepFailure(step_id, line_of(error, step_id))), times
