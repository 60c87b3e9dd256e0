"""One HTTP connection: uvicorn's protocol, with limits on what a client may send and how slowly.

Headers, trailers and body each have a limit in size or time; a request beyond one gets an error
with a JSON body, and the connection is closed. So does a request that is not valid HTTP: a message
whose framing is ambiguous (RFC 9112, 3.2 and 6.1) is rejected before the app sees it.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.observe.request_log import RequestLog, RequestRecord
from gateway.serve.places import Place

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 << 10  # request line, headers and trailers
HEAD_SECONDS = 30.0
BODY_BYTES_PER_SECOND = 64 << 10  # a body that arrives at this rate gets more time
GRACE_SECONDS = 5.0  # in which the route may reject a slow body first
MAX_PIPELINED = 16  # requests that wait for the responses before theirs
SLICE_BYTES = 2_048  # parsed at a time; it may contain 50 further requests
MAX_UNPARSED_BYTES = 1 << 20
MAX_LATE_BYTES = 256 << 10  # of a body that go on arriving after its response
PARSING_SECONDS = 0.002  # that the data of one read may take at once; more is metered
PARSING_SHARE = 0.1  # of the loop's time, for all connections whose data takes longer
_INVALID = "invalid_request_error"
_FIELD_OVERHEAD = 4  # of a header: ": " and the line's end


class Retirement:
    """Whether another server accepts the connections of new clients, after an upgrade."""

    has_begun = False


class ConnectionBounds(NamedTuple):
    """Maximum open connections, in total and of one client; timeouts for receiving a body and for
    a client that stops reading. `probes` are the paths for which places remain."""

    max_connections: int = 1 << 20
    body_seconds: float = 60.0
    stall_seconds: float = 600.0
    meter: "ParsingMeter | None" = None  # shared by all connections of a server
    max_per_network: int = 1 << 20
    probes: frozenset[bytes] = frozenset()
    retirement: Retirement = Retirement()  # of a server that can be upgraded, its own


class ParsingMeter:
    """The time that connections take whose data is costly to parse, such as chunks of one byte."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def delay(self, seconds: float, now: float) -> float:
        """How long a connection must rest that has parsed for so many seconds."""
        self._free_at = max(now, self._free_at) + seconds / PARSING_SHARE
        return self._free_at - now


class Rejection(Exception):  # it ends the parsing of a request, as its error response
    """Raised in a callback of the parser: the request ends with this error response."""

    def __init__(
        self, status: int, message: str, kind: str = _INVALID, code: str = _INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code


class Connection(HttpToolsProtocol):
    """Counts the bytes of each request's head and trailers, and runs two timers: one while a
    request arrives, one while the client does not read."""

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
        self._began_at = log.clock()  # the current request
        self._is_in_head = False
        self._fields_bytes = 0  # of the request line, the headers and trailers that are complete
        self._open_bytes = 0  # received since a header, trailer or chunk began that is incomplete
        self._chunk = 0  # number of the chunk whose data is awaited, 0 while none is
        self._num_chunks = 0
        self._body_bytes = 0
        self._body_began_at = 0.0  # loop seconds; set at the end of the headers
        self._rejection: Rejection | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None  # whose response comes next
        self._unparsed = b""
        self._parsing: asyncio.Handle | None = None  # when `_unparsed` is parsed on
        self._is_in_body = False
        self._num_messages = 0
        self._overhead_bytes = 0  # of the body's framing: sizes and extensions of chunks
        self._late_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._place.close = transport.abort
        self._arm(HEAD_SECONDS, self._head_too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        self._disarm()
        self._stop_stall()
        self._unparsed = b""
        if self._parsing is not None:
            self._parsing.cancel()
        if self.pipeline:  # those that wait are dropped; the one that runs sees the disconnect
            self.pipeline.clear()
            self.cycle = self._running  # type: ignore[assignment] # one runs if others wait
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._release()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self._place.rest()
        if self._unparsed:
            self.flow.pause_reading()
            self._parse_later(0.0)
        self._release()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stall()
        self._stall = self.loop.call_later(self._bounds.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse in slices, until too many requests wait or it has taken too long. The rest is
        parsed when a response is complete, or after a rest."""
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
        self._parsing = None
        if self.parser is None:  # it is a WebSocket now
            return
        data, self._unparsed = self._unparsed, b""
        clock = self._log.clock
        began, at = clock(), 0
        while at < len(data) and not self.transport.is_closing() and self.parser is not None:
            is_late = clock() - began > PARSING_SECONDS
            if is_late or len(self.pipeline) >= MAX_PIPELINED:
                self._unparsed = data[at:]
                self.flow.pause_reading()
                if is_late:
                    self._parse_later(self._meter.delay(clock() - began, clock()))
                return
            self._feed(data[at : at + SLICE_BYTES])
            at += SLICE_BYTES
        if not self.pipeline and not self._body_waits:
            self.flow.resume_reading()

    @property
    def _body_waits(self) -> bool:
        """Whether the app has not read what has arrived of the body."""
        cycle = self.cycle
        return cycle is not None and len(cycle.body) > HIGH_WATER_LIMIT

    def _parse_later(self, seconds: float) -> None:
        if self._parsing is None and len(self.pipeline) < MAX_PIPELINED:
            self._parsing = self.loop.call_later(seconds, self._parse)

    def _feed(self, data: bytes) -> None:
        before = self._awaited
        message, num_body_bytes = self._num_messages, self._body_bytes
        was_in_body = self._is_in_body
        super().data_received(data)
        if was_in_body and self._is_in_body and message == self._num_messages:
            self._overhead_bytes += len(data) - (self._body_bytes - num_body_bytes)
            if self._overhead_bytes > MAX_HEAD_BYTES + self._body_bytes:
                self._reject(431, _TOO_SMALL_CHUNKS)
        if self._awaited is None or self._awaited != before:
            self._open_bytes = 0
            return
        self._open_bytes += len(data)
        if self._open_bytes > MAX_HEAD_BYTES:
            self._reject(431, _TOO_LARGE)

    @property
    def _awaited(self) -> tuple[str, int] | None:
        """The part of a message that is incomplete: its head, or what follows the header of a
        chunk, which is data, or trailers if the chunk is the last one."""
        if self._is_in_head:
            return ("head", self._num_messages)
        return ("chunk", self._chunk) if self._chunk else None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began_at = self._log.clock()
        self._is_in_head = True
        self._num_messages += 1
        self._overhead_bytes = self._late_bytes = 0
        self._fields_bytes = self._chunk = self._num_chunks = 0
        self._arm(HEAD_SECONDS, self._head_too_slow)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or after the body a trailer, which is dropped (RFC 9110, 6.5.1)."""
        self._count(len(name) + len(value) + _FIELD_OVERHEAD)
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        try:
            check_framing(self.headers, self.parser.get_http_version())
            if self._place.is_for_probes and self.url.partition(b"?")[0] not in self._bounds.probes:
                raise Rejection(503, _FULL, "server_error", "overloaded")
        except Rejection as rejection:
            self._rejection = rejection
            raise
        self._place.begin()
        self._is_in_head = False
        self._is_in_body = True
        self._body_bytes = 0
        self._body_began_at = self.loop.time()
        self._arm(self._bounds.body_seconds + GRACE_SECONDS, self._body_too_slow)
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        self._chunk = self._num_chunks

    def on_body(self, body: bytes) -> None:
        self._chunk = 0
        self._body_bytes += len(body)
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._late_bytes += len(body)
            if self._late_bytes > MAX_LATE_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._chunk = 0
        self._is_in_body = False
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser's error, or the rejection that one of its callbacks raised."""
        rejection, self._rejection = self._rejection or Rejection(400, msg), None
        self._reject(rejection.status, str(rejection), rejection.kind, rejection.code)

    def _count(self, num_bytes: int) -> None:
        self._fields_bytes += num_bytes
        if self._fields_bytes > MAX_HEAD_BYTES:
            self._rejection = Rejection(431, _TOO_LARGE)
            raise self._rejection

    def _arm(self, seconds: float, then: Callable[[], None]) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, then)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _body_too_slow(self) -> None:
        """Close, unless the body's size so far earns it more time."""
        earned = self._body_bytes / BODY_BYTES_PER_SECOND
        until = self._body_began_at + self._bounds.body_seconds + GRACE_SECONDS + earned
        left = until - self.loop.time()
        if left > 0:
            self._arm(left, self._body_too_slow)
        else:
            self.transport.close()

    def _head_too_slow(self) -> None:
        if self._is_in_head:
            self._reject(
                408, f"The request's headers did not arrive within {HEAD_SECONDS:g} seconds."
            )
        else:
            self.transport.close()

    def _reject(
        self, status: int, message: str, kind: str = _INVALID, code: str = _INVALID
    ) -> None:
        """Respond with the error, if no other response has begun, and close the connection. The
        app logs a request that it has got, with the error that the scope then contains."""
        self._disarm()
        self._chunk = 0
        has_begun = self._ends_other_response()
        is_in_head = self._is_in_head or self.cycle is None
        self._is_in_head = False
        if self.transport.is_closing():
            return
        if not has_begun:
            error = {"message": message, "type": kind, "param": None, "code": code}
            body = orjson.dumps({"error": error})
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
            if is_in_head:
                self._log.close(self._record(status, message))
            else:
                self.cycle.scope["podway.rejection"] = (status, message)  # type: ignore[typeddict-unknown-key] # ours
        self.transport.close()

    def _record(self, status: int, message: str) -> RequestRecord:
        """The entry of a rejected request in the request log."""
        method = self.parser.get_method().decode("latin-1") if self._fields_bytes else "-"
        path = (getattr(self, "url", b"") or b"-").partition(b"?")[0][:1000].decode("latin-1")
        client = self.client[0] if self.client else "-"
        record = RequestRecord("-", self._began_at, method, path, client)
        record.status, record.reason = status, message
        return record

    def _ends_other_response(self) -> bool:
        """Whether the bytes that are written next belong to a response of the app. If the app has
        not begun to respond to the request that is rejected, it sees a disconnect."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        if self._is_in_head or self.pipeline or cycle.response_started:
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


_FULL = "The server has as many open connections as it allows."
_TOO_SMALL_CHUNKS = "The chunks of the body are too small, or their extensions too long."
_TOO_LARGE = f"The request's headers and trailers are larger than {MAX_HEAD_BYTES} bytes."


def check_framing(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Raises `Rejection` unless there is one Host (HTTP/1.0: at most one), and no transfer coding
    but chunked."""
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version != "1.0"):
        raise Rejection(400, f"A request must have one Host header, not {hosts}.")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        shown = b", ".join(codings)[:100].decode("latin-1")
        raise Rejection(501, f"Transfer-Encoding {shown!r} is not supported; send 'chunked'.")
