"""The bound on the head of a request, in virtual time with a transport that only remembers."""

import asyncio
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from engine.simulated.virtual_loop import run_virtual
from gateway.serve.connection import (
    BODY_BYTES_PER_SECOND,
    GRACE_SECONDS,
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
    Connection,
    ConnectionBounds,
)


class Remembers:
    """A transport whose peer never reads."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def reads_on(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def connect(
    bounds: ConnectionBounds | None = None, state: ServerState | None = None, app: Any = app
) -> tuple[Connection, Remembers]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", http=Connection)
    config.load()
    connection = Connection(config, state or ServerState(), {}, bounds=bounds)
    peer = Remembers()
    connection.connection_made(cast("asyncio.Transport", peer))
    return connection, peer


def test_a_connection_that_sends_nothing_is_closed() -> None:
    async def main() -> None:
        _, peer = connect()
        await asyncio.sleep(HEAD_SECONDS - 1)
        assert not peer.is_closed
        await asyncio.sleep(1.5)
        assert peer.is_closed
        assert peer.written == b""

    run_virtual(main())


def test_request_headers_that_arrive_too_slowly_are_a_408() -> None:
    async def main() -> None:
        connection, peer = connect()
        for byte in b"GET / HTTP/1.1\r\nx: yyyyyyyyyyyyyyyyyy":
            if not peer.is_closed:
                connection.data_received(bytes([byte]))
            await asyncio.sleep(1)
        assert peer.written.startswith(b"HTTP/1.1 408 ")
        assert peer.is_closed

    run_virtual(main())


def test_request_headers_without_end_are_a_431() -> None:
    async def main() -> None:
        connection, peer = connect()
        connection.data_received(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(MAX_HEAD_BYTES // 1000 + 1):
            connection.data_received(b"y" * 1000)
        assert peer.written.startswith(b"HTTP/1.1 431 ")
        assert peer.is_closed

    run_virtual(main())


def test_a_request_in_time_is_answered_and_the_connection_stays() -> None:
    async def main() -> None:
        connection, peer = connect()
        for _ in range(2):
            connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(3)
        assert peer.written.count(b"HTTP/1.1 204 ") == 2
        assert not peer.is_closed
        connection.connection_lost(None)

    run_virtual(main())


def test_a_body_that_arrives_too_slowly_closes_the_connection() -> None:
    async def main() -> None:
        connection, peer = connect(ConnectionBounds(body_seconds=10.0), app=reads_on)
        connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        for _ in range(14):
            connection.data_received(b"y")
            await asyncio.sleep(1)
        assert not peer.is_closed
        await asyncio.sleep(GRACE_SECONDS - 3.5)
        assert peer.is_closed
        connection.connection_lost(None)

    run_virtual(main())


def test_a_long_body_may_take_longer_if_it_keeps_coming() -> None:
    async def main() -> None:
        connection, peer = connect(ConnectionBounds(body_seconds=1.0), app=reads_on)
        connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n")
        for _ in range(30):
            connection.data_received(b"y" * BODY_BYTES_PER_SECOND)
            await asyncio.sleep(1)
        assert not peer.is_closed
        await asyncio.sleep(GRACE_SECONDS + 2)
        assert peer.is_closed
        connection.connection_lost(None)

    run_virtual(main())


def test_a_response_that_is_not_read_closes_the_connection() -> None:
    async def main() -> None:
        connection, peer = connect(ConnectionBounds(stall_seconds=10.0))
        connection.pause_writing()
        await asyncio.sleep(8)
        connection.resume_writing()
        connection.pause_writing()
        await asyncio.sleep(8)
        assert not peer.is_closed
        await asyncio.sleep(3)
        assert peer.is_closed
        connection.connection_lost(None)

    run_virtual(main())


def test_one_connection_too_many_is_a_503() -> None:
    async def main() -> None:
        state = ServerState()
        bounds = ConnectionBounds(max_connections=1)
        first, peer = connect(bounds, state)
        _, late = connect(bounds, state)
        assert late.written.startswith(b"HTTP/1.1 503 ")
        assert b'"overloaded"' in late.written
        assert late.is_closed
        assert not peer.is_closed
        first.connection_lost(None)

    run_virtual(main())
