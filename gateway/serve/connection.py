"""One HTTP connection: uvicorn's protocol, with limits on what a client may send and how slowly.

Headers, trailers and body each have a limit in size or time; a request beyond one gets an error
with a JSON body, and the connection is closed. So does a request that is not valid HTTP: a message
whose framing is ambiguous (RFC 9112, 3.2 and 6.1) is rejected before the app sees it.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from uvicorn._types import ASGI3Application, ASGISendCallable, ASGISendEvent
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.observe.request_log import RequestLog, RequestRecord
from gateway.serve.arrival import (
    MAX_LATE_BYTES,
    Arrival,
    ParsingMeter,
    Rejection,
    SharedRate,
    Timer,
    check_framing,
)
from gateway.serve.linger import BYTES_PER_SECOND, Linger
from gateway.serve.places import Place

MAX_PIPELINED = 16  # requests that wait for the responses before theirs
MAX_UNPARSED_BYTES = 1 << 20
_FIELD_OVERHEAD = 4  # ": " and the line's end of a header
_FULL = "The server has as many open connections as it allows."


class Retirement:
    """Whether clients should use new connections: after an upgrade, and while the server drains."""

    has_begun = False


class ConnectionBounds(NamedTuple):
    """Maximum open connections, in total and of one client; timeouts for receiving a body and for
    a client that stops reading. `probes` are the paths for which places remain."""

    max_connections: int = 1 << 20
    body_seconds: float = 60.0
    stall_seconds: float = 600.0
    meter: ParsingMeter | None = None  # shared by all connections of a server
    max_per_network: int = 1 << 20
    probes: frozenset[bytes] = frozenset()
    retirement: Retirement = Retirement()  # a server has its own
    linger_rate: SharedRate | None = None  # shared likewise


class ChunkWriter:
    """Writes parts of a body, whose head was sent, as uvicorn does; `is_open` while that need not
    wait."""

    __slots__ = ("_write", "is_open")

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self.is_open = True

    def write(self, body: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(body), body))


class Connection(HttpToolsProtocol):
    """Passes to the parser what a client sends, as far as its `Arrival` allows, and ends the
    connection of a client that does not read."""

    def __init__(
        self,
        *args: Any,
        log: RequestLog,
        place: Place,
        bounds: ConnectionBounds | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._log = log
        self._place = place
        self._bounds = bounds or ConnectionBounds()
        self._meter = self._bounds.meter or ParsingMeter()
        self._linger_rate = self._bounds.linger_rate or SharedRate(BYTES_PER_SECOND)
        self._began_at = log.clock()  # the current request
        self._stall = Timer()
        self._running: RequestResponseCycle | None = None  # the request whose response comes next
        self._chunks: ChunkWriter  # from `connection_made` on
        self._unparsed = b""
        self._rest = Timer()  # until `_unparsed` is parsed on
        self._stays_open = False  # after a response, if the body has arrived before it begins

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._place.close = transport.abort
        self._arrival = Arrival(self._bounds.body_seconds, self._reject, transport.close)
        self._linger = Linger(transport, self.flow, self._arrival, self._linger_rate)
        self._chunks = ChunkWriter(transport.write)

    def connection_lost(self, exc: Exception | None) -> None:
        self._chunks.is_open = False
        self._place.leave()
        self._arrival.end()
        self._linger.stop()
        del self._arrival, self._linger  # they refer to the connection
        self._stall.stop()
        self._rest.stop()
        self._unparsed = b""
        if self.pipeline:  # those that wait are dropped; the one that runs sees the disconnect
            self.pipeline.clear()
            self.cycle = self._running  # type: ignore[assignment] # one runs if others wait
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._release()

    def on_response_complete(self) -> None:
        if self._linger.has_begun and self.pipeline:  # nothing is written behind this response
            self.pipeline.clear()
            self.cycle = self._running  # type: ignore[assignment] # as above
        super().on_response_complete()
        if self._linger.has_begun:
            self._unset_keepalive_if_required()
            self._linger.discard(len(self._unparsed))
            self._unparsed = b""
        if not self.pipeline:
            self._place.rest()
        if self._unparsed:
            self.flow.pause_reading()
            if not self._rest.is_set:
                self._rest.set(0.0, self._parse)
        self._release()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.transport = self._linger.transport_of(cycle)  # type: ignore[assignment] # all it needs
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        else:
            cycle.scope["podway.chunks"] = self._chunks  # type: ignore[typeddict-unknown-key] # ours
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._chunks.is_open = False
        self._stall.set(self._bounds.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()
        self._chunks.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._linger.has_begun:
            self._linger.discard(len(data))
            return
        if self._unparsed and len(self._unparsed) + len(data) > MAX_UNPARSED_BYTES:
            self.transport.abort()
            return
        is_waiting = bool(self._unparsed)
        self._unparsed += data
        if is_waiting:
            self.flow.pause_reading()
        else:
            self._parse()

    def _parse(self) -> None:
        """Parse until too many requests wait or it has taken too long. The rest is parsed when a
        response is complete, or after a rest."""
        if self.parser is None or self._linger.has_begun:  # it is a WebSocket now, or ends
            return
        self._unparsed, delay = self._meter.parse(
            self._unparsed, self._feed, lambda: len(self.pipeline) < MAX_PIPELINED, self._log.clock
        )
        if delay is not None:
            self._rest.set(delay, self._parse)
        if self.transport.is_closing() or self._linger.has_begun:
            self._linger.discard(len(self._unparsed))
            self._unparsed = b""
            return
        is_read = self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT  # by the app
        if self._unparsed:
            self.flow.pause_reading()
        elif is_read and not self.pipeline:
            self.flow.resume_reading()

    def _feed(self, data: bytes) -> bool:
        self._arrival.feed(data, super().data_received)
        return not self.transport.is_closing() and not self._linger.has_begun

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began_at = self._log.clock()
        self._arrival.begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or after the body a trailer, which is dropped (RFC 9110, 6.5.1)."""
        self._arrival.add_field(len(name) + len(value) + _FIELD_OVERHEAD)
        if self._arrival.is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._arrival.add_field(len(self.url))
        check_framing(self.headers, self.parser.get_http_version())
        if self._place.is_for_probes and self.url.partition(b"?")[0] not in self._bounds.probes:
            raise Rejection(503, _FULL, "server_error", "overloaded")
        self._place.begin()
        self._arrival.begin_body(self.headers)
        super().on_headers_complete()
        is_large = self._arrival.num_left > MAX_LATE_BYTES
        # Without a 100 a client that expects it may take the connection for its next request.
        if (is_large or self.expect_100_continue) and self.cycle is not None:
            self._stays_open, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_chunk_header(self) -> None:
        self._arrival.begin_chunk()

    def on_body(self, body: bytes) -> None:
        self._arrival.add_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arrival.end()
        if self._stays_open and not self._bounds.retirement.has_begun:
            self.cycle.keep_alive = True
        self._stays_open = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser's error, or the rejection that one of its callbacks raised."""
        error = sys.exception()  # the parser's, which uvicorn is handling
        cause = None if error is None else error.__context__
        self._reject(cause if isinstance(cause, Rejection) else Rejection(400, msg))

    def _reject(self, rejection: Rejection) -> None:
        """Respond with the error, if no other response has begun, and close the connection. The
        app logs a request that it has got, with the error that the scope then contains."""
        has_begun = self._ends_other_response()
        is_in_head = self._arrival.is_in_head or self.cycle is None
        self._arrival.end()
        if self.transport.is_closing() or self._linger.has_begun:
            return
        if not has_begun:
            self.transport.write(rejection.response())
            if is_in_head:
                url = getattr(self, "url", b"")
                method = self.parser.get_method().decode("latin-1") if url else "-"
                path = (url or b"-").partition(b"?")[0][:1000].decode("latin-1")
                client = self.client[0] if self.client else "-"
                record = RequestRecord("-", self._began_at, method, path, client)
                record.status, record.reason = rejection.status, str(rejection)
                self._log.close(record)
            else:
                self.cycle.scope["podway.rejection"] = (rejection.status, str(rejection))  # type: ignore[typeddict-unknown-key] # ours
        if has_begun or self._place.is_for_probes:  # there are few such places
            self.transport.close()
        else:
            self._linger.begin()
            self._place.rest()

    def _ends_other_response(self) -> bool:
        """Whether the bytes that are written next belong to a response of the app. If the app has
        not begun to respond to the request that is rejected, it sees a disconnect."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        if self._arrival.is_in_head or self.pipeline or cycle.response_started:
            return True
        cycle.disconnected = True
        cycle.message_event.set()
        return False

    def _release(self) -> None:
        """After the connection and its last response: drop the references that form a cycle, so
        that the memory of its requests does not wait for the garbage collector."""
        is_lost = self.parser is None
        if is_lost and (self.cycle is None or self.cycle.response_complete):
            del self.cycle, self.scope, self.headers, self.flow
            self._running = None


def _without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """`app` for HTTP/1.0, without chunks: a body without a length ends with the connection."""
    cycle.chunked_encoding = False

    async def respond(scope: Any, receive: Any, send: ASGISendCallable) -> None:
        async def send_unframed(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unframed)

    return respond
