"""A connection over a transport that records what is written."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from gateway.observe.request_log import RequestLog
from gateway.serve.connection import (
    Connection,
    ConnectionBounds,
)
from gateway.serve.places import Place, Places

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n\r\n" + b"a" * 40
ENDLESS = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class RecordingTransport:
    """Records what is written; its peer never reads."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.has_written_eof = False
        self.is_lost = False

    def write(self, data: bytes) -> None:
        if self.is_lost:
            raise RuntimeError("unable to perform operation; the handler is closed")  # as uvloop
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_written_eof = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self._check_open()

    def resume_reading(self) -> None:
        self._check_open()

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("unable to perform operation; the handler is closed")  # as uvloop


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def reads_on(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def connect(
    bounds: ConnectionBounds | None = None,
    state: ServerState | None = None,
    app: Any = app,
    place: Place | None = None,
    peer: RecordingTransport | None = None,
) -> tuple[Connection, RecordingTransport]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", http=Connection)
    config.load()
    place = place or Places().enter("client")
    assert place is not None
    connection = Connection(
        config, state or ServerState(), {}, bounds=bounds, log=RequestLog(lambda: 0.0), place=place
    )
    peer = peer or RecordingTransport()
    connection.connection_made(cast("asyncio.Transport", peer))
    return connection, peer


async def reply_after_the_body(scope: Any, receive: Any, send: Any) -> None:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
    headers = b", ".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": headers, "more_body": False})


def rejected_with(peer: RecordingTransport) -> bytes:
    """The status of the only response, after which nothing more is written."""
    assert peer.has_written_eof
    assert peer.written.count(b"HTTP/1.1 ") == 1
    return peer.written.split()[1]


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
