"""EventStream: the ASGI response of a plan with `stream: true`.

Three tasks run in one group: the events, the pings, and the wait for the client's disconnect; the
first that ends cancels the others. A token costs one rendering and one write. The task of the
events is woken for it only if the write may have to wait, if there are several choices, or if it
has log-probabilities.

The status line is held back until the first event or for `Pace.hold`, so that a rejected request
gets its real status; after it an error is one event and the end of the stream. While a write is
blocked, tokens gather in the `TokenStream` as integers, and the next event carries all of them.

At shutdown nothing here ends a stream: the engine does, with an error, when its drain time is
over. (sse-starlette formats pings and errors. Its `EventSourceResponse` is not used: it sends the
status line at once, pings also while events flow, and cancels streams at the first signal.)
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineError
from engine.ports import Clock
from engine.request import Abort
from engine.stream import Write
from gateway.access.callers import Caller
from gateway.generation.choices import ChoiceGroup, generate_body, generate_events
from gateway.generation.plan import GenerationPlan
from gateway.generation.reply import Reply, error_response
from gateway.observe.timelines import Wait
from gateway.schema.rendering import Delta, EventNumbers, TextFrame
from gateway.service import Service

BLOCKED_SECONDS = 0.02  # a longer write means that the client does not read
EVENT_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would collect events
}


def stream_start(caller: Caller, clock: Clock) -> Message:
    """The status line of a stream of events, with the headers that every response carries."""
    content = {"content-type": "text/event-stream; charset=utf-8"}
    headers = EVENT_HEADERS | content | caller.headers(clock())
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": encoded}


async def send_error(error: EngineError, caller: Caller, clock: Clock, send: Send) -> None:
    """Send an error as the whole response."""
    response = error_response(error, caller, clock)
    status, headers = response.status_code, response.raw_headers
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": False})


class Chunks(Protocol):
    """`podway.chunks` of the scope: writes parts of a body as `send` does, if it need not wait."""

    @property
    def is_open(self) -> bool: ...

    def write(self, body: bytes) -> None: ...


class EventStream:
    """Streams a plan's choices as they are sampled, interleaved."""

    __slots__ = (
        "_chunks", "_frame", "_group", "_has_ended", "_has_started", "_has_written",
        "_num_writing", "_numbers", "_plan", "_send", "_sending", "_service", "_starting", "_write",
    )  # fmt: skip

    def __init__(self, plan: GenerationPlan, service: Service) -> None:
        self._plan = plan
        self._service = service
        self._group = ChoiceGroup(plan, service)
        self._numbers = EventNumbers()
        self._frame: TextFrame | None = None  # once the renderer has it
        self._starting, self._sending = asyncio.Lock(), asyncio.Lock()
        self._send: Send  # through the middleware, and
        self._write: Send  # directly to the server, and
        self._chunks: Chunks | None  # without waiting: all are set by `__call__`
        self._has_started = self._has_ended = False
        self._num_writing = 0  # writes that have begun and not ended
        self._has_written = False  # since the last look of `_keep_alive`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return when the stream has ended or the client has disconnected."""
        self._send, self._write = send, scope["podway.send"]
        self._chunks = scope.get("podway.chunks")
        runs = self._stream(), self._keep_alive(), self._wait_for_disconnect(receive)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(_until_cancelled(run)) for run in runs]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in running:
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _stream(self) -> None:
        direct = None if self._chunks is None else self
        events = generate_events(self._plan, self._group, self._send_events, direct=direct)
        try:
            await self._end(await events)
        except EngineError as error:
            await self._fail(error)

    def is_open(self) -> bool:
        """Whether `add` may be called: no write waits, and the loop is not late."""
        return (
            self._has_started
            and not self._has_ended
            and not self._num_writing
            and not self._service.watch.gap
            and self._chunks is not None
            and self._chunks.is_open
        )

    def add(self, index: int, delta: Delta, writes: list[Write]) -> None:
        """Add what the only choice adds to the writes."""
        chunks, frame = self._chunks, self._frame
        assert chunks is not None, "it is open"
        if frame is not None and len(delta) == 1 and isinstance(text := delta[0], str):
            events = self._numbers.framed(text, frame)
        else:
            renderer = self._plan.renderer
            self._frame = renderer.text_frame(index)
            events = self._numbers.numbered(renderer.delta(index, delta, self._group))
        if events:
            writes.append((chunks.write, events))
            self._has_written = True

    async def _send_events(self, events: bytes) -> None:
        if not self._has_started:
            await self._start()
        async with self._sending:  # events of choices are sent in the order of their numbers
            await self._send_bytes(self._numbers.numbered(events))
        if self._service.watch.gap:
            await asyncio.sleep(self._service.watch.gap)  # the loop is late: let tokens gather

    async def _send_bytes(self, events: bytes) -> None:
        self._num_writing += 1
        began = self._service.clock()
        try:
            await self._write({"type": "http.response.body", "body": events, "more_body": True})
        finally:  # also if the response ends because the client does not read
            waited = self._service.clock() - began
            if waited > BLOCKED_SECONDS:
                wait = Wait(began, waited)
                self._service.timelines.reader_waits.add(self._plan.caller.request_id, wait)
        self._num_writing -= 1
        self._has_written = True

    async def _start(self) -> None:
        """Send the status line once; a second task waits here until it has been sent."""
        async with self._starting:
            if self._has_started:
                return
            await self._send(stream_start(self._plan.caller, self._service.clock))
            self._has_started = True

    async def _end(self, events: bytes) -> None:
        if not self._has_started:
            await self._start()
        self._has_ended = True
        body = self._numbers.numbered(events)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _fail(self, error: EngineError) -> None:
        """Answer with the error's status if nothing was sent yet, else with one last event."""
        async with self._starting:
            is_first, self._has_started = not self._has_started, True
        if not is_first:
            await self._end(self._plan.renderer.failure(error))
            return
        self._has_ended = True
        await send_error(error, self._plan.caller, self._service.clock, self._send)

    async def _keep_alive(self) -> None:
        """Send the status line after `Pace.hold`, then a ping per `Pace.ping` without an event.

        Returns, which ends the response, once a write has been blocked for `Pace.stall`.
        """
        pace = self._service.pace
        await asyncio.sleep(pace.hold)
        await self._start()
        blocked_seconds = 0.0
        while not self._has_ended and blocked_seconds < pace.stall:
            self._has_written = False
            await asyncio.sleep(pace.ping)
            if self._has_written:
                blocked_seconds = 0.0
            elif self._num_writing:
                blocked_seconds += pace.ping
            elif not self._has_ended:
                await self._send_bytes(self._group.ping)
        self._group.close(Abort.SLOW_CLIENT)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        """End the requests in the moment in which the client's disconnect is received."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_ended = True
        self._group.close(Abort.CLIENT_GONE)


async def _until_cancelled(run: Coroutine[object, object, None]) -> None:
    """Await `run`. A task whose coroutine raises a cancellation keeps the error, and by its
    traceback itself."""
    with suppress(asyncio.CancelledError):
        await run


def respond(plan: GenerationPlan, service: Service) -> ASGIApp:
    """The ASGI response of a plan: an event stream or a JSON body, as the request chose."""
    if plan.is_stream:
        return EventStream(plan, service)
    group = ChoiceGroup(plan, service)
    abandon = partial(group.close, Abort.CLIENT_GONE)
    return Reply(plan.caller, partial(generate_body, plan, group), abandon, service)
