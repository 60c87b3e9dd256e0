"""The bound on the head of a request, in virtual time with a transport that only remembers."""

import asyncio
from typing import Any, cast

import uvicorn

from engine.simulated.loop import run_virtual
from gateway.connection import HEAD_SECONDS, MAX_HEAD_BYTES, Connection


class Remembers:
    """A transport whose peer never reads."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
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


def connect() -> tuple[Connection, Remembers]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", http=Connection)
    server = uvicorn.Server(config)
    connection, peer = Connection(config, server.server_state, {}), Remembers()
    connection.connection_made(cast("asyncio.Transport", peer))
    return connection, peer


def test_a_peer_that_says_nothing_is_hung_up_on() -> None:
    async def main() -> None:
        _, peer = connect()
        await asyncio.sleep(HEAD_SECONDS - 1)
        assert not peer.is_closed
        await asyncio.sleep(1.5)
        assert peer.is_closed
        assert peer.written == b""

    run_virtual(main())


def test_a_head_that_comes_byte_by_byte_is_a_408() -> None:
    async def main() -> None:
        connection, peer = connect()
        for byte in b"GET / HTTP/1.1\r\nx: yyyyyyyyyyyyyyyyyy":
            if not peer.is_closed:
                connection.data_received(bytes([byte]))
            await asyncio.sleep(1)
        assert peer.written.startswith(b"HTTP/1.1 408 ")
        assert peer.is_closed

    run_virtual(main())


def test_a_head_without_end_is_a_431() -> None:
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
