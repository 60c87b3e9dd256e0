"""EventStream: the response of `stream: true`. It owns the leases of its choices.

sse-starlette runs the response as tasks of one group: this stream, the pings, the watch for the
client's departure. Ours differ in what a token costs: one wake, one rendering, one write. The
status line is held until the first event or `Pace.hold`, so that refusals are real statuses;
after it an error is one event and the end. While a write is stuck, tokens gather in the
`TokenStream` as integers, and the next event carries all of them.
"""

import asyncio
from typing import TYPE_CHECKING

import anyio
from sse_starlette import EventSourceResponse

from engine.errors import EngineError
from engine.request import Abort
from gateway.generation.choices import ChoiceGroup
from gateway.generation.reply import error_response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from gateway.generation.choice_stream import ChoiceStream
    from gateway.generation.plan import GenerationPlan
    from gateway.service import Service


class EventStream(EventSourceResponse):
    """Streams an order's choices as they are sampled, interleaved."""

    def __init__(self, order: "GenerationPlan", service: "Service") -> None:
        super().__init__(iter(()), ping=service.pace.ping)
        self._order = order
        self._service = service
        self._choir = ChoiceGroup(order, service)
        self._starting = asyncio.Lock()
        self._write: Send  # the server's own, from `__call__` on
        self._has_started = False
        self._num_begun = 0  # sends
        self._num_done = 0

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer, and be done when the answer is, or when the client has left."""
        self._write = scope["podway.send"]
        await super().__call__(scope, receive, send)

    async def _stream_response(self, send: "Send") -> None:
        try:
            with self._choir as choir:
                await choir.gather()
                rest = await choir.each(lambda voice: self._speak(voice, send))
                rest.append(self._order.frames.closing(choir))
            if self._order.seal is not None:
                await self._order.seal()
            await self._end(b"".join(rest), send)
        except EngineError as error:
            await self._fail(error, send)

    async def _speak(self, voice: "ChoiceStream", send: "Send") -> bytes:
        """Send a choice's events. What a lone choice says last is returned, to go out with the
        end of the stream in one write."""
        frames, index, watch, choir = (
            self._order.frames,
            voice.index,
            self._service.watch,
            self._choir,
        )
        while True:
            said = await voice.next()
            events = frames.delta(index, said, choir) if said else b""
            if voice.end is not None:
                break
            if events:
                await self._send(events, send)
                if watch.gap:
                    await asyncio.sleep(watch.gap)  # tokens gather meanwhile
        events += frames.ending(index, voice.end, choir)
        if len(choir.voices) == 1:
            return events
        await self._send(events, send)
        return b""

    async def _send(self, events: bytes, send: "Send") -> None:
        if not self._has_started:
            await self._start(send)
        self._num_begun += 1
        await self._write({"type": "http.response.body", "body": events, "more_body": True})
        self._num_done += 1

    async def _start(self, send: "Send") -> None:
        """The status line, once; whoever comes second waits until it is out."""
        async with self._starting:
            if self._has_started:
                return
            headers = self._order.caller.headers(self._service.clock())
            named = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": [*self.raw_headers, *named],
                }
            )
            self._has_started = True

    async def _end(self, events: bytes, send: "Send") -> None:
        if not self._has_started:
            await self._start(send)
        self.active = False
        await send({"type": "http.response.body", "body": events, "more_body": False})

    async def _fail(self, error: EngineError, send: "Send") -> None:
        """A real status if nothing is out yet, else one event and the end."""
        async with self._starting:
            is_silent, self._has_started = not self._has_started, True
        if not is_silent:
            await self._end(self._order.frames.failure(error), send)
            return
        self.active = False
        response = error_response(error, self._order.caller, self._service.clock)
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": response.raw_headers,
            }
        )
        await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _ping(self, send: "Send") -> None:
        """Release the status line in time; then keep the line warm while nothing is said.

        Returning ends the response: that is what happens to a client that stopped reading.
        """
        pace = self._service.pace
        await anyio.sleep(pace.hold)
        await self._start(send)
        stuck_for = 0.0
        while self.active and stuck_for < pace.stall:
            num_done = self._num_done
            await anyio.sleep(pace.ping)
            if self._num_done != num_done:
                stuck_for = 0.0
            elif self._num_begun != num_done:
                stuck_for += pace.ping
            elif self.active:
                await self._send(self._order.frames.ping, send)
        self._choir.close(Abort.SLOW_CLIENT)

    async def _listen_for_disconnect(self, receive: "Receive") -> None:
        """Wait for the client to leave and end its requests in the same breath."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.active = False
        self._choir.close(Abort.CLIENT_GONE)

    async def _listen_for_exit_signal_with_grace(self) -> None:
        """Nothing to listen for: at shutdown the engine ends what is left, with an error."""
        await anyio.sleep_forever()
