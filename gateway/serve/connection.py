"""One HTTP connection: uvicorn's protocol, with bounds on what a client may make us wait for.

A head that is too large or too slow is refused, and what is no HTTP at all gets a JSON body too.
A body that trickles in, or an answer that nobody reads, ends the connection.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0
_INVALID = "invalid_request_error"
BODY_BYTES_PER_SECOND = 64 << 10  # a long body may take longer, if it comes at this pace
GRACE_SECONDS = 5.0  # for the route to refuse a slow body in its own words first


class ConnectionBounds(NamedTuple):
    """Of all connections; seconds of waiting for a body and for a reader."""

    max_connections: int = 1 << 20
    body_seconds: float = 60.0
    stall_seconds: float = 600.0


class Connection(HttpToolsProtocol):
    """From the first byte of a request to the last a clock and a scale are on; another clock
    is on while the client does not read."""

    def __init__(self, *args: Any, bounds: ConnectionBounds | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds or ConnectionBounds()
        self._is_in_head = False
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_began_at = 0.0  # loop seconds; from the end of the head on
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            message = f"The server has {self._bounds.max_connections} open connections, its most."
            self._refuse(503, message, "server_error", "overloaded")
            return
        self._arm(HEAD_SECONDS, self._head_too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stall()
        self._stall = self.loop.call_later(self._bounds.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0
        self._arm(HEAD_SECONDS, self._head_too_slow)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._body_bytes = 0
        self._body_began_at = self.loop.time()
        self._arm(self._bounds.body_seconds + GRACE_SECONDS, self._body_too_slow)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed as HTTP."""
        self._refuse(400, msg)

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
        """Hang up, unless there is more than the clock could know of."""
        pace = self._body_bytes / BODY_BYTES_PER_SECOND
        until = self._body_began_at + self._bounds.body_seconds + GRACE_SECONDS + pace
        left = until - self.loop.time()
        if left > 0:
            self._arm(left, self._body_too_slow)
        else:
            self.transport.close()

    def _head_too_slow(self) -> None:
        if self._is_in_head:
            self._refuse(408, f"The request's head did not arrive within {HEAD_SECONDS:g} seconds.")
        else:
            self.transport.close()

    def _refuse(
        self, status: int, message: str, kind: str = _INVALID, code: str = _INVALID
    ) -> None:
        """Say why and hang up, unless an earlier answer is still being written."""
        self._disarm()
        self._is_in_head = False
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            error = {"message": message, "type": kind, "param": None, "code": code}
            body = orjson.dumps({"error": error})
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
