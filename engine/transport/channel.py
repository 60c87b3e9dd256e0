"""Sends steps to all workers of a model and receives results from one of them, without blocking.

A channel is open from the moment all workers have loaded until it is lost or closed. `submit`
sends the step to every worker at once, so that each pipeline stage has the step before its hidden
states arrive. Results come from one worker only (`Placement.returns_results`) and resolve the
futures in order. The channel is lost when a worker exits, sends invalid data or exceeds the time
limit of a step: every future in flight then fails with `WorkerLost`.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from engine.errors import StepFailed, WorkerLost
from engine.lora import LoraReport, LoraSpec, common_report
from engine.media import ImagePixels
from engine.step import Step, StepId, StepResult
from engine.transport.trace import TraceFile
from engine.transport.wire import (
    FrameReader,
    FromWorker,
    Goodbye,
    LoadLora,
    LoraLoaded,
    RunStep,
    SendPixels,
    StepFailure,
    StepRan,
    TraceEvents,
    UnloadLora,
    WireError,
    frame,
    read_from_worker,
)
from engine.worker_settings import Placement

RECEIVE_BYTES = 1 << 16


class ConnectionLost(NamedTuple):
    """Why a connection was lost; `is_closed` if the worker closed it, as it does when it ends."""

    message: str
    is_closed: bool


class WorkerConnection:
    """Reads and writes a non-blocking socket, which the caller owns, until `close`.

    `on_message` is called with each message and may raise `WireError`. `on_lost` is called once
    with the reason when the worker closes the connection or sends invalid data.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[FromWorker], None],
        on_lost: Callable[[ConnectionLost], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameReader()
        self._room = memoryview(bytearray(RECEIVE_BYTES))
        self._backlog = bytearray()
        self._sent = asyncio.Event()  # whether there is no backlog, or nobody reads it any more
        self._sent.set()
        self._is_open = True
        self._loop.add_reader(connection.fileno(), self.read)

    def write(self, data: bytes | bytearray) -> None:
        """Send a frame; what the socket does not accept now is sent when it is writable again."""
        if self._backlog:
            self._backlog += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._backlog = bytearray(memoryview(data)[sent:])
            self._sent.clear()
            self._loop.add_writer(self._connection.fileno(), self._write_backlog)

    async def sent(self) -> None:
        """Wait until the socket has accepted all frames, or is not written any more."""
        await self._sent.wait()

    def read(self) -> None:
        """Receive what has arrived and pass on each complete message."""
        if not self._is_open:
            return
        try:
            num_bytes = self._connection.recv_into(self._room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the worker exited with unread steps, or is unreachable
            num_bytes = 0
        if not num_bytes:
            self._on_lost(ConnectionLost("closed the connection", is_closed=True))
            return
        try:
            for payload in self._frames.feed(self._room[:num_bytes]):
                if self._is_open:
                    self._on_message(read_from_worker(payload))
        except WireError as error:
            self._on_lost(ConnectionLost(f"sent invalid data: {error}", is_closed=False))

    def send_goodbye(self) -> None:
        """Ask the worker to exit, unless earlier frames are still unsent."""
        if self._is_open and not self._backlog:
            with contextlib.suppress(OSError):
                self._connection.send(frame(Goodbye()))

    def close(self) -> None:
        """Stop reading and writing. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._sent.set()
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())

    def _write_backlog(self) -> None:
        del self._backlog[: self._send(self._backlog)]
        if not self._backlog:
            self._sent.set()
            self._loop.remove_writer(self._connection.fileno())

    def _send(self, data: bytes | bytearray) -> int:
        """Send without blocking; returns how many bytes need not be sent again."""
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # The worker is gone. `read` finds that out too, after the last results.
            return len(data)


ResultFuture = asyncio.Future[StepResult]
LoraFuture = asyncio.Future[LoraReport]


class _PendingStep(NamedTuple):
    step_id: StepId
    result: ResultFuture


class _PendingLora(NamedTuple):
    reports: dict[Placement, LoraReport]  # the workers that have answered
    future: LoraFuture


class StepChannel:
    """Exchanges steps and results with loaded workers. The caller owns the sockets.

    `step_seconds` limits the time of the oldest step in flight. `on_lost(reason)` is called once,
    after the futures have failed; it is not called when `close` ends the channel. `trace` is
    required if the workers were loaded with `WorkerSettings.traces`.
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
        self._loras: dict[int, _PendingLora] = {}  # being loaded, by id
        self._ended: str | None = None
        self.num_results = 0  # results received; failed steps are not counted
        self.num_lost = 0  # steps that were in flight when the channel ended
        self.closed_by: Placement | None = None  # the worker that closed its connection
        self._connections = {
            placement: WorkerConnection(
                connection,
                partial(self._receive, placement),
                partial(self._lose_connection, placement),
            )
            for placement, connection in connections.items()
        }

    @property
    def ended(self) -> str | None:
        """Why the channel has ended; None while it is open."""
        return self._ended

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, step: Step) -> ResultFuture:
        """Send the step to all workers and return the future of its result.

        The future has already failed if the step cannot be serialized (`StepFailed`) or the
        channel has ended (`WorkerLost`).
        """
        result: ResultFuture = self._loop.create_future()
        if self._ended is not None:
            result.set_exception(WorkerLost(self._ended))
            return result
        try:
            data = frame(RunStep(step))
        except WireError as error:
            result.set_exception(StepFailed(f"step {step.step_id} {error}"))
            return result
        if not self._in_flight:
            self._oldest_since = self._loop.time()
        self._in_flight.append(_PendingStep(step.step_id, result))
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(self._step_seconds, self._check_overdue)
        self._send_all(data)
        if self._trace is not None:
            self._trace.submitted(step)
        return result

    def load_lora(self, spec: LoraSpec) -> LoraFuture:
        """Let all workers load a LoRA adapter beside their steps; the future is their common
        report. It fails with `WorkerLost` if the channel ends."""
        future: LoraFuture = self._loop.create_future()
        if self._ended is not None:
            future.set_exception(WorkerLost(self._ended))
            return future
        self._loras[spec.lora_id] = _PendingLora({}, future)
        self._send_all(frame(LoadLora(spec)))
        return future

    def unload_lora(self, lora_id: int) -> None:
        """Let all workers free an adapter, which no step in flight uses."""
        if self._ended is None:
            self._send_all(frame(UnloadLora(lora_id)))

    async def send_pixels(self, piece: ImagePixels) -> None:
        """Send a piece of an image to the workers of the first stage, which encode it. Waits until
        their sockets have it, so that a step waits behind one piece at most."""
        if self._ended is None:
            data = frame(SendPixels(piece))
            first = [each for place, each in self._connections.items() if place.stage == 0]
            for connection in first:
                connection.write(data)
            for connection in first:
                await connection.sent()

    def _send_all(self, data: bytearray) -> None:
        for connection in self._connections.values():
            connection.write(data)

    def close(self, reason: str) -> None:
        """Send every worker a goodbye and fail the futures in flight with `reason`. Idempotent."""
        if self._ended is None:
            for connection in self._connections.values():
                connection.send_goodbye()
        self._end(reason)

    def _lose_connection(self, placement: Placement, reason: ConnectionLost) -> None:
        if self._ended is None and reason.is_closed:
            self.closed_by = placement
        self._lose(f"{_name(placement)} {reason.message}")

    def _lose(self, reason: str) -> None:
        if self._ended is None:
            self._end(reason)
            self._on_lost(reason)

    def _end(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        self.num_lost = len(self._in_flight)
        for connection in self._connections.values():
            connection.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
        while self._in_flight:
            future = self._in_flight.popleft().result
            if not future.done():
                future.set_exception(WorkerLost(reason))
                future.exception()  # the engine awaits the first of them only
        for pending in self._loras.values():
            if not pending.future.done():
                pending.future.set_exception(WorkerLost(reason))
        self._loras.clear()

    def _receive(self, placement: Placement, message: FromWorker) -> None:
        match message:
            case StepRan(result) if placement.returns_results:
                self._resolve(result.step_id, result)
            case TraceEvents() if self._trace is not None:
                self._trace.step_traced(placement, message)
            case LoraLoaded(report) if report.lora_id in self._loras:
                self._collect_lora(placement, report)
            case StepFailure(step_id, text) if placement.returns_results:
                self._resolve(step_id, StepFailed(text))
            case _:
                raise WireError(f"{type(message).__name__} is not a result of a step")

    def _resolve(self, step_id: StepId, result: StepResult | StepFailed) -> None:
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise WireError(f"a result of step {step_id}, which is not the oldest step in flight")
        future = self._in_flight.popleft().result
        self.num_results += isinstance(result, StepResult)
        if self._trace is not None:
            self._trace.finished(step_id)
        self._oldest_since = self._loop.time()
        if future.done():  # the caller has cancelled it
            return
        if isinstance(result, StepResult):
            future.set_result(result)
        else:
            future.set_exception(result)

    def _collect_lora(self, placement: Placement, report: LoraReport) -> None:
        reports, future = self._loras[report.lora_id]
        reports[placement] = report
        if len(reports) == len(self._connections):
            del self._loras[report.lora_id]
            if not future.done():
                future.set_result(common_report([*reports.values()]))

    def _check_overdue(self) -> None:
        """Lose the channel if the oldest step is overdue; otherwise set the timer again."""
        self._watchdog = None
        if self._remaining_seconds() <= 0:
            # This process may have been the one that was suspended: read what has arrived.
            for connection in self._connections.values():
                connection.read()
        if self._ended is not None or not self._in_flight:
            return
        remaining = self._remaining_seconds()
        if remaining > 0:
            self._watchdog = self._loop.call_later(remaining, self._check_overdue)
            return
        step_id = self._in_flight[0].step_id
        self._lose(f"the worker hangs: step {step_id} took longer than {self._step_seconds:g} s")

    def _remaining_seconds(self) -> float:
        return self._oldest_since + self._step_seconds - self._loop.time()


def _name(placement: Placement) -> str:
    return "the worker" if placement.num_workers == 1 else f"the worker of {placement}"
