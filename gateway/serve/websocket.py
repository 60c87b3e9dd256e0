"""WebSocketConnection: a connection after its upgrade from HTTP, as text messages.

`websockets` does the framing, without extensions, so that nothing is compressed. What a client may
send is bounded: the size of a message, its fragments, the messages that wait to be read, and the
loop's time for parsing, which the connections of a server share (`ParsingMeter`). While the client
does not read, its data is not read either, so that its pings do not fill the buffer of pongs.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from websockets.datastructures import Headers
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN, SEND_EOF
from websockets.server import ServerProtocol

from engine.errors import InvalidRequest
from gateway.serve.arrival import ParsingMeter, Timer
from gateway.serve.connection import Connection
from gateway.serve.places import Place

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, HTTPScope
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from websockets.frames import Frame

    from engine.ports import Clock

MAX_MESSAGE_BYTES = 4 << 20  # removing the mask of so many takes 3 ms
MAX_FRAGMENTS = 1024  # fragments of a message
MAX_INBOX = 16  # messages that wait to be read
CHECK_SECONDS = 30.0  # between pings; a client that sends nothing meanwhile is gone
CLOSE_SECONDS = 2.0  # for the client's half of the closing handshake
BYTES_PER_SECOND = 64 << 10  # a message that arrives at this rate gets more time
_BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})
ENDING = "The server is shutting down."
NOT_TEXT, NOT_UTF_8, TOO_SLOW, TOO_LARGE, GOING_AWAY = 1003, 1007, 1008, 1009, 1001


@dataclass(frozen=True, slots=True)
class SocketBounds:
    """Limits of one connection: bytes of a message and seconds for its arrival, and seconds for
    which a client may not read."""

    max_bytes: int = MAX_MESSAGE_BYTES
    message_seconds: float = 60.0
    stall_seconds: float = 600.0


class WebSocketConnection(asyncio.Protocol):
    """The text messages of one connection. `connections` are those of the server."""

    def __init__(
        self,
        transport: asyncio.Transport,
        place: Place,
        connections: set[Any],
        clock: "Clock",
        meter: ParsingMeter,
        bounds: SocketBounds,
    ) -> None:
        self._transport = transport
        self._place = place
        self._connections = connections
        self._clock = clock
        self._meter = meter
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._frames = ServerProtocol(state=OPEN, max_size=bounds.max_bytes)
        self._fragments: list[bytes] = []
        self._inbox: deque[bytes] = deque()
        self._arrival = asyncio.Event()  # set when a message, or the end, arrives
        self._writable = asyncio.Event()
        self._writable.set()
        self._unparsed = b""
        self._rest = Timer()  # until `_unparsed` is parsed on
        self._stall = Timer()
        self._checking = Timer()
        self._was_heard = True  # since the last check
        self._open_bytes = 0  # bytes of the message that is arriving
        self._opened_at = 0.0
        self._is_closed = False  # no more messages will be read
        self._is_busy = False  # since the last message, until `rest`
        self._is_ending = False  # the server ends

    def begin(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Answer the handshake and take over the transport. Raises `InvalidRequest`."""
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        response = self._frames.accept(Request(path, Headers(named)))
        if response.status_code != 101:
            reason = (response.body or b"").decode().partition("\n")[0]
            raise InvalidRequest(reason or "This is not a WebSocket handshake.")
        self._transport.write(response.serialize())
        self._transport.set_protocol(self)
        self._connections.add(self)
        self._checking.set(CHECK_SECONDS, self._check)

    async def receive(self) -> bytes | None:
        """The next message; None once the connection has ended."""
        while not self._inbox:
            if self._is_closed:
                return None
            self._arrival.clear()
            await self._arrival.wait()
        message = self._inbox.popleft()
        self._place.begin()
        self._is_busy = True
        if not self._rest.is_set and not self._is_closed:
            self._parse()
        return message

    async def send(self, messages: Iterable[bytes]) -> None:
        """Send text messages, in one write; waits while the client does not read."""
        await self._writable.wait()
        if self._frames.state is OPEN:
            for message in messages:
                self._frames.send_text(message)
            self._flush()

    def rest(self) -> None:
        """Nothing runs: while the server is full, a new connection may take the place."""
        self._is_busy = False
        self._place.rest()
        if self._is_ending:
            self.close(GOING_AWAY, ENDING)

    def ping(self) -> None:
        """Let proxies see that the connection is in use."""
        if self._frames.state is OPEN and self._writable.is_set():
            self._frames.send_ping(b"")
            self._flush()

    def close(self, code: int, reason: str = "") -> None:
        """Begin the closing handshake. No more messages are read."""
        self._end()
        if self._frames.state is OPEN:
            self._frames.send_close(code, reason)
            self._flush()
        self._loop.call_later(CLOSE_SECONDS, self._transport.abort)

    def shutdown(self) -> None:
        """The server ends: uvicorn calls this as for HTTP connections. The last events of a
        response are sent first."""
        self._is_ending = True
        if not self._is_busy:
            self.close(GOING_AWAY, ENDING)

    def retire(self) -> None:
        """Clients should use new connections now: close once nothing runs."""
        self.shutdown()

    def connection_lost(self, error: Exception | None) -> None:
        self._place.leave()
        self._connections.discard(self)
        self._end()
        self._writable.set()
        self._frames.parser.close()  # it refers to its protocol, which refers to it
        for timer in (self._rest, self._stall, self._checking):
            timer.stop()

    def data_received(self, data: bytes) -> None:
        self._was_heard = True
        self._unparsed += data
        if not self._rest.is_set:
            self._parse()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._stall.set(self._bounds.stall_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        self._writable.set()
        self._stall.stop()
        if not self._rest.is_set:
            self._parse()

    def _parse(self) -> None:
        """Parse until it has taken too long, too many messages wait, or the client does not read.
        The rest is parsed after a rest, or when that has changed."""
        self._unparsed, delay = self._meter.parse(
            self._unparsed, self._feed, self._has_room, self._clock
        )
        if delay is not None:
            self._rest.set(delay, self._parse)
        if self._transport.is_closing():
            return
        if self._unparsed:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _has_room(self) -> bool:
        return len(self._inbox) < MAX_INBOX and self._writable.is_set()

    def _feed(self, data: bytes) -> bool:
        if not self._open_bytes:
            self._opened_at = self._loop.time()
        self._open_bytes += len(data)
        self._frames.receive_data(data)
        for event in self._frames.events_received():
            self._take(event)  # type: ignore[arg-type] # the handshake is over, so it is a frame
        self._flush()
        return not self._transport.is_closing()

    def _take(self, frame: "Frame") -> None:
        if frame.opcode is Opcode.BINARY:
            self.close(NOT_TEXT, "Messages are text: JSON objects.")
        elif frame.opcode in (Opcode.TEXT, Opcode.CONT) and not self._is_closed:
            self._fragments.append(bytes(frame.data))
            if len(self._fragments) > MAX_FRAGMENTS:
                self.close(TOO_LARGE, f"A message has more than {MAX_FRAGMENTS} fragments.")
            elif frame.fin:
                self._inbox.append(b"".join(self._fragments))
                self._fragments, self._open_bytes = [], 0
                self._arrival.set()
                if not _is_utf_8(self._inbox[-1]):
                    self.close(NOT_UTF_8, "Messages are text in UTF-8.")
        elif not self._fragments:
            self._open_bytes = 0

    def _flush(self) -> None:
        """Write what the framing has to send, which may be the end of the stream."""
        output = self._frames.data_to_send()
        ends = SEND_EOF in output
        if not self._transport.is_closing():
            self._transport.write(b"".join(output))
        if ends:
            self._end()
            self._transport.close()

    def _end(self) -> None:
        self._is_closed = True
        self._inbox.clear()
        self._fragments, self._unparsed = [], b""
        self._arrival.set()

    def _check(self) -> None:
        """Close if the client is gone or its message too slow; else ask for a sign of it."""
        age = self._loop.time() - self._opened_at - self._open_bytes / BYTES_PER_SECOND
        is_read = self._writable.is_set() and not self._unparsed
        if is_read and not self._was_heard:
            self._transport.abort()
        elif self._open_bytes and age > self._bounds.message_seconds:
            self.close(TOO_SLOW, "The message did not arrive in time.")
        else:
            self._was_heard = False
            self.ping()
            self._checking.set(CHECK_SECONDS, self._check)


def _is_utf_8(text: bytes) -> bool:
    """Takes up to 3 ms for 4 MiB."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class UpgradableConnection(Connection):
    """An HTTP connection whose request may ask for a WebSocket; see `podway.upgrade` in the scope,
    which only such requests have."""

    def on_headers_complete(self) -> None:
        if self._get_upgrade() == b"websocket":
            self.scope["podway.upgrade"] = partial(self._upgrade, self.scope)  # type: ignore[typeddict-unknown-key] # ours
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: "RequestResponseCycle", app: "ASGI3Application") -> None:
        if self._bounds.retirement.has_begun and not self.pipeline:
            cycle.keep_alive = False  # the response says so
        super()._start_asgi_task(cycle, app)

    def retire(self) -> None:
        """Clients should use new connections now. The next response that begins here tells the
        client to close; nothing is closed that could carry a request at this moment."""
        cycle = self._running
        if cycle is not None and not (cycle.response_started or self.pipeline):
            cycle.keep_alive = False

    def _upgrade(self, scope: "HTTPScope", max_bytes: int) -> WebSocketConnection:
        """Hand the transport over to a WebSocket whose messages may have so many bytes. The
        request has no other response. Raises `InvalidRequest` if the handshake is not valid."""
        cycle, transport = self.cycle, self.transport
        if cycle is None or cycle.scope is not scope or cycle.more_body or transport.is_closing():
            raise InvalidRequest("An upgrade must be the only request of its connection.")
        if not _BODY_HEADERS.isdisjoint(name for name, _ in scope["headers"]):
            raise InvalidRequest("A request for a WebSocket has no body.")
        bounds = SocketBounds(
            min(max_bytes, MAX_MESSAGE_BYTES),
            self._bounds.body_seconds,
            self._bounds.stall_seconds,
        )
        clock = self._log.clock
        websocket = WebSocketConnection(
            transport, self._place, self.connections, clock, self._meter, bounds
        )
        websocket.begin(self.url.decode("latin-1"), scope["headers"])
        if self._bounds.retirement.has_begun:
            websocket.retire()
        cycle.response_started = cycle.response_complete = True
        self.connections.discard(self)
        self._arrival.end()
        del self._arrival
        self._unset_keepalive_if_required()
        self.parser = None  # type: ignore[assignment] # nothing is parsed here any more
        self._release()
        return websocket
