"""Steps out and answers in over one connected socket, on the event loop, without waiting.

A channel lives from the moment the worker is loaded until it is lost or closed, once. `submit`
writes at once; what the socket does not take leaves through a writer callback. Answers resolve
the futures in order. The worker's end, bytes that are no answer, or a step that takes too long
lose the channel: every future in flight then ends with `WorkerLost`.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.errors import StepFailed, WorkerLost
from engine.step import Step, StepId, StepResult
from engine.transport.wire import (
    Failed,
    FrameReader,
    FromWorker,
    Goodbye,
    Ran,
    Run,
    WireError,
    frame,
    read_from_worker,
)

RECEIVE_BYTES = 1 << 16

StepAnswer = asyncio.Future[StepResult]


class _InFlight(NamedTuple):
    step_id: StepId
    answer: StepAnswer


class StepChannel:
    """One worker's conversation after loading. Borrows the socket, which must not block.

    `step_seconds` bounds the time of the oldest step in flight. `on_lost` is called once with
    the reason, after the futures have failed; not when `close` ends the channel.
    """

    def __init__(
        self, connection: socket.socket, step_seconds: float, on_lost: Callable[[str], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._step_seconds = step_seconds
        self._on_lost = on_lost
        self._frames = FrameReader()
        self._backlog = bytearray()
        self._in_flight: deque[_InFlight] = deque()
        self._oldest_since = 0.0  # valid while a step is in flight
        self._watchdog: asyncio.TimerHandle | None = None
        self._ended: str | None = None
        self._loop.add_reader(connection.fileno(), self._read)

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
            data = frame(Run(step))
        except WireError as error:
            answer.set_exception(StepFailed(f"step {step.step_id} {error}"))
            return answer
        if not self._in_flight:
            self._oldest_since = self._loop.time()
        self._in_flight.append(_InFlight(step.step_id, answer))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._step_seconds, self._watch)
        self._write(data)
        return answer

    def close(self, reason: str) -> None:
        """Say goodbye and end; futures in flight fail with `reason`. Idempotent."""
        if self._ended is None and not self._backlog:
            with contextlib.suppress(OSError):
                self._connection.send(frame(Goodbye()))
        self._end(reason)

    def _lose(self, reason: str) -> None:
        if self._ended is None:
            self._end(reason)
            self._on_lost(reason)

    def _end(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        if self._watchdog is not None:
            self._watchdog.cancel()
        while self._in_flight:
            answer = self._in_flight.popleft().answer
            if not answer.done():
                answer.set_exception(WorkerLost(reason))

    def _write(self, data: bytearray) -> None:
        if self._backlog:
            self._backlog += data
            return
        del data[: self._send(data)]
        if data:
            self._backlog = data
            self._loop.add_writer(self._connection.fileno(), self._write_backlog)

    def _write_backlog(self) -> None:
        del self._backlog[: self._send(self._backlog)]
        if not self._backlog:
            self._loop.remove_writer(self._connection.fileno())

    def _send(self, data: bytearray) -> int:
        """How many bytes need no further care."""
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The worker is gone. The reader finds that out too, after the last answers.
            return len(data)

    def _read(self) -> None:
        try:
            piece = self._connection.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:  # it left with steps unread
            piece = b""
        if not piece:
            self._lose("the worker left the connection")
            return
        try:
            for payload in self._frames.feed(piece):
                self._take(read_from_worker(payload))
        except WireError as error:
            self._lose(f"the worker sent rubbish: {error}")

    def _take(self, message: FromWorker) -> None:
        match message:
            case Ran(result):
                step_id = result.step_id
            case Failed(step_id):
                pass
            case _:
                raise WireError(f"{type(message).__name__} is no answer to a step")
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise WireError(f"an answer to step {step_id}, which is not the next one due")
        answer = self._in_flight.popleft().answer
        self._oldest_since = self._loop.time()
        if answer.done():  # the caller gave the future up
            return
        if isinstance(message, Ran):
            answer.set_result(message.result)
        else:
            answer.set_exception(StepFailed(message.line))

    def _watch(self) -> None:
        """Runs when the oldest step may be overdue: looks again, and sleeps on if it is not."""
        self._watchdog = None
        if self._remaining_seconds() <= 0:
            self._read()  # this process may have been the one that slept
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
