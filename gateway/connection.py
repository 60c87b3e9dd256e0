"""One HTTP connection: uvicorn's protocol, with a bound on the head of a request.

A head that is too large or too slow is refused, and what is no HTTP at all gets a JSON body too.
"""

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 30.0


class Connection(HttpToolsProtocol):
    """From the first byte of a request to the end of its headers a clock and a scale are on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

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
        self._arm()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What could not be parsed as HTTP."""
        self._refuse(400, msg)

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self._is_in_head:
            self._refuse(408, f"The request's head did not arrive within {HEAD_SECONDS:g} seconds.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Say why and hang up, unless an earlier answer is still being written."""
        self._disarm()
        self._is_in_head = False
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            code = "invalid_request_error"
            error = {"message": message, "type": code, "param": None, "code": code}
            body = orjson.dumps({"error": error})
            head = (
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
