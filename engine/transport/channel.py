"""Steps out to all workers of a model and answers in from one of them, without waiting.

A channel lives from the moment the workers are loaded until it is lost or closed, once. `submit`
writes the step to every worker at once, so that each stage knows it before its hidden states
come. Results come from the last worker only (`Placement.returns_results`) and resolve the futures
in order. The end of any worker, bytes that are no answer, or a step that takes too long
lose the channel: every future in flight then ends with `WorkerLost`.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from engine.errors import StepFailed, WorkerLost
from engine.step import Placement, Step, StepId, StepResult
from engine.transport.connection import WorkerConnection
from engine.transport.trace import TraceFile
from engine.transport.wire import (
    FromWorker,
    RunStep,
    StepFailure,
    StepRan,
    TraceEvents,
    WireError,
    frame,
)

StepAnswer = asyncio.Future[StepResult]


class _PendingStep(NamedTuple):
    step_id: StepId
    answer: StepAnswer


class StepChannel:
    """The conversation with the workers after loading. Borrows the sockets.

    `step_seconds` bounds the time of the oldest step in flight. `on_lost` is called once with
    the reason, after the futures have failed; not when `close` ends the channel. Workers that
    were told to trace want a `trace`.
    """

    def __init__(
        self,
        connections: Mapping[Placement, socket.socket],
        step_seconds: float,
        on_lost: Callable[[str], None],
        trace: TraceFile | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._step_seconds = step_seconds
        self._on_lost = on_lost
        self._trace = trace
        self._in_flight: deque[_PendingStep] = deque()
        self._oldest_since = 0.0  # valid while a step is in flight
        self._watchdog: asyncio.TimerHandle | None = None
        self._ended: str | None = None
        self._lines = [
            WorkerConnection(
                connection, partial(self._take, placement), partial(self._lose_one, placement)
            )
            for placement, connection in connections.items()
        ]

    @property
    def ended(self) -> str | None:
        """Why there will be no more answers; None while the channel lives."""
        return self._ended

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, step: Step) -> StepAnswer:
        """Hand the step over; the answer comes through the future.

        A step that cannot be written down fails at once, and on an ended channel every step
        does.
        """
        answer: StepAnswer = self._loop.create_future()
        if self._ended is not None:
            answer.set_exception(WorkerLost(self._ended))
            return answer
        try:
            data = frame(RunStep(step))
        except WireError as error:
            answer.set_exception(StepFailed(f"step {step.step_id} {error}"))
            return answer
        if not self._in_flight:
            self._oldest_since = self._loop.time()
        self._in_flight.append(_PendingStep(step.step_id, answer))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._step_seconds, self._watch)
        for line in self._lines:
            line.write(data)
        if self._trace is not None:
            self._trace.submitted(step)
        return answer

    def close(self, reason: str) -> None:
        """Say goodbye and end; futures in flight fail with `reason`. Idempotent."""
        if self._ended is None:
            for line in self._lines:
                line.say_goodbye()
        self._end(reason)

    def _lose_one(self, placement: Placement, reason: str) -> None:
        self._lose(f"{_name(placement)} {reason}")

    def _lose(self, reason: str) -> None:
        if self._ended is None:
            self._end(reason)
            self._on_lost(reason)

    def _end(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        for line in self._lines:
            line.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
        while self._in_flight:
            answer = self._in_flight.popleft().answer
            if not answer.done():
                answer.set_exception(WorkerLost(reason))

    def _take(self, placement: Placement, message: FromWorker) -> None:
        match message:
            case TraceEvents() if self._trace is not None:
                self._trace.worked(placement, message)
            case StepRan(result) if placement.returns_results:
                self._settle(result.step_id, result)
            case StepFailure(step_id, line) if placement.returns_results:
                self._settle(step_id, StepFailed(line))
            case _:
                raise WireError(f"{type(message).__name__} is no answer to a step")

    def _settle(self, step_id: StepId, result: StepResult | StepFailed) -> None:
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise WireError(f"an answer to step {step_id}, which is not the next one due")
        answer = self._in_flight.popleft().answer
        if self._trace is not None:
            self._trace.answered(step_id)
        self._oldest_since = self._loop.time()
        if answer.done():  # the caller gave the future up
            return
        if isinstance(result, StepResult):
            answer.set_result(result)
        else:
            answer.set_exception(result)

    def _watch(self) -> None:
        """Runs when the oldest step may be overdue: looks again, and sleeps on if it is not."""
        self._watchdog = None
        if self._remaining_seconds() <= 0:
            for line in self._lines:  # this process may have been the one that slept
                line.read()
        if self._ended is not None or not self._in_flight:
            return
        remaining = self._remaining_seconds()
        if remaining > 0:
            self._watchdog = self._loop.call_later(remaining, self._watch)
            return
        step_id = self._in_flight[0].step_id
        self._lose(f"the worker hangs: step {step_id} took longer than {self._step_seconds:g} s")

    def _remaining_seconds(self) -> float:
        return self._oldest_since + self._step_seconds - self._loop.time()


def _name(placement: Placement) -> str:
    return "the worker" if placement.num_workers == 1 else f"the worker of {placement}"
