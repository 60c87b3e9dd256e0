"""The upgrade to a WebSocket, and the limits on what its client may send, in virtual time."""

import asyncio
import gc
import os
import weakref
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from engine.simulated.virtual_loop import run_virtual
from gateway.observe.request_log import RequestLog
from gateway.serve.arrival import SLICE_BYTES
from gateway.serve.connection import ConnectionBounds
from gateway.serve.places import Places
from gateway.serve.websocket import (
    CHECK_SECONDS,
    CLOSE_SECONDS,
    GOING_AWAY,
    MAX_FRAGMENTS,
    MAX_INBOX,
    NOT_TEXT,
    NOT_UTF_8,
    TOO_LARGE,
    TOO_SLOW,
    UpgradableConnection,
    WebSocketConnection,
)
from tests.gateway.scenes import in_virtual_time
from tests.gateway.serve.recording import RecordingTransport

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
)
PROTOCOL_ERROR = 1002


class Transport(RecordingTransport):
    """Records also whether reading is paused, and the protocol that took over."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.protocol: WebSocketConnection

    def set_protocol(self, protocol: WebSocketConnection) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Peer:
    """A client: its transport, and the frames that the server has sent."""

    def __init__(self, bounds: ConnectionBounds, max_bytes: int) -> None:
        state = ServerState()
        self.connections: set[object] = cast("set[object]", state.connections)
        self.transport = Transport()
        self.server: WebSocketConnection
        self._num_read = 0
        self._frames = ClientProtocol(parse_uri("ws://x"), state=OPEN)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.server = scope["podway.upgrade"](max_bytes)
            await asyncio.Event().wait()

        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        config.load()
        log, place = RequestLog(lambda: 0.0), Places().enter("client")
        assert place is not None
        self.http = UpgradableConnection(config, state, {}, bounds=bounds, log=log, place=place)
        self.http.connection_made(cast("asyncio.Transport", self.transport))

    def send(self, data: bytes) -> None:
        self.server.data_received(data)

    def frames(self) -> list[Frame]:
        """What the server has sent since the last call."""
        data, self._num_read = self.transport.written[self._num_read :], len(self.transport.written)
        self._frames.receive_data(data)
        return cast("list[Frame]", self._frames.events_received())

    def close_code(self) -> int:
        (*_, last) = self.frames()
        assert last.opcode is Opcode.CLOSE
        return int.from_bytes(last.data[:2], "big")


def frame(data: bytes = b"x", opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    """A frame of a client, whose data is masked."""
    return Frame(opcode, data, fin).serialize(mask=True)


async def connected(bounds: ConnectionBounds | None = None, max_bytes: int = 1 << 20) -> Peer:
    peer = Peer(bounds or ConnectionBounds(), max_bytes)
    peer.http.data_received(HANDSHAKE)
    await asyncio.sleep(0.01)
    head, _, rest = peer.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head  # of the key, as in RFC 6455
    assert b"extensions" not in head.lower()
    assert rest == b""
    peer._num_read = len(peer.transport.written)
    return peer


def test_a_rest_of_the_parser_may_end_after_the_upgrade() -> None:
    async def scenario() -> None:
        peer = await connected()
        peer.http._parse()
        peer.send(frame())
        assert await peer.server.receive() == b"x"

    run_virtual(scenario())


@in_virtual_time
async def test_an_upgraded_connection_carries_messages_both_ways() -> None:
    peer = await connected()
    assert peer.transport.protocol is peer.server
    assert peer.connections == {peer.server}
    first, second = frame(b"on\xc3", fin=False), frame(b"\xa9", Opcode.CONT)
    peer.send(first + frame(b"", Opcode.PING) + second)
    assert await peer.server.receive() == "on\u00e9".encode()
    await peer.server.send((b"two", b"three"))
    assert [bytes(each.data) for each in peer.frames()] == [b"", b"two", b"three"]
    peer.send(frame((1000).to_bytes(2, "big"), Opcode.CLOSE))
    assert await peer.server.receive() is None
    assert peer.transport.is_closed
    peer.server.connection_lost(None)
    assert peer.connections == set()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(b"x", Opcode.BINARY), NOT_TEXT),
        (frame(b'"\xff"'), NOT_UTF_8),
        (frame("é".encode()[:1], fin=False) + frame(b"", Opcode.CONT), NOT_UTF_8),
        (frame(b"x" * 65), TOO_LARGE),
        (frame(b"x" * 40, fin=False) + frame(b"x" * 40, Opcode.CONT), TOO_LARGE),
        (frame(b"", fin=False) + frame(b"", Opcode.CONT, fin=False) * MAX_FRAGMENTS, TOO_LARGE),
        (bytes([frame()[0] | 0x40]) + frame()[1:], PROTOCOL_ERROR),  # as compressed data has
        (frame(b"x", Opcode.CONT), PROTOCOL_ERROR),
        (frame(b"a", fin=False) + frame(b"b"), PROTOCOL_ERROR),
        (Frame(Opcode.TEXT, b"x").serialize(mask=False), PROTOCOL_ERROR),
        (b"GET / HTTP/1.1\r\n\r\n", PROTOCOL_ERROR),
    ],
    ids=[  # masks are random
        "binary",
        "no UTF-8",
        "half a character",
        "large",
        "large in fragments",
        "many fragments",
        "compressed",
        "a continuation of nothing",
        "a text in a text",
        "no mask",
        "HTTP",
    ],
)
@in_virtual_time
async def test_rubbish_closes_the_connection_with_a_reason(data: bytes, code: int) -> None:
    peer = await connected(max_bytes=64)
    peer.send(data)
    await asyncio.sleep(60)  # parsing rests
    assert peer.close_code() == code
    assert await peer.server.receive() is None
    assert peer.transport.is_closed


@in_virtual_time
async def test_random_bytes_end_the_connection_or_wait_for_more() -> None:
    for _ in range(200):
        peer = await connected(max_bytes=64)
        peer.send(os.urandom(64))
        await asyncio.sleep(4 * CHECK_SECONDS)
        assert peer.transport.is_closed


@in_virtual_time
async def test_a_lost_connection_is_freed_without_the_garbage_collector() -> None:
    peer = await connected()
    peer.send(frame(b"x", fin=False))
    frames = weakref.ref(peer.server._frames)
    gc.collect()
    gc.disable()
    try:
        peer.server.connection_lost(None)
        await peer.server.send((b"late",))
        del peer.server, peer.transport.protocol
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(1)
        assert frames() is None
    finally:
        gc.enable()


@in_virtual_time
async def test_messages_that_nobody_reads_stop_the_reading() -> None:
    peer = await connected()
    num_sent = 2 * MAX_INBOX + SLICE_BYTES
    peer.send(frame() * num_sent)
    assert peer.transport.is_paused
    for _ in range(num_sent):
        assert await peer.server.receive() == b"x"
    assert not peer.transport.is_paused


@in_virtual_time
async def test_pings_of_a_client_that_does_not_read_are_not_answered_without_end() -> None:
    peer = await connected()
    peer.server.pause_writing()
    for _ in range(3):
        peer.send(frame(b"", Opcode.PING) * 1000)
    assert peer.transport.is_paused
    assert peer.frames() == []
    peer.server.resume_writing()
    await asyncio.sleep(60)
    assert sum(each.opcode is Opcode.PONG for each in peer.frames()) == 3000


@in_virtual_time
async def test_a_client_that_never_reads_is_aborted() -> None:
    peer = await connected(ConnectionBounds(stall_seconds=100))
    peer.server.pause_writing()
    await asyncio.sleep(99)
    assert not peer.transport.is_closed
    await asyncio.sleep(2)
    assert peer.transport.is_closed


@in_virtual_time
async def test_a_silent_client_is_asked_for_a_sign_and_then_closed() -> None:
    peer = await connected()
    await asyncio.sleep(CHECK_SECONDS + 1)
    assert [each.opcode for each in peer.frames()] == [Opcode.PING]
    peer.send(frame(b"", Opcode.PONG))
    await asyncio.sleep(CHECK_SECONDS)
    assert not peer.transport.is_closed
    await asyncio.sleep(CHECK_SECONDS)
    assert peer.transport.is_closed


@in_virtual_time
async def test_a_message_that_arrives_too_slowly_closes_the_connection() -> None:
    peer = await connected(ConnectionBounds(body_seconds=60))
    data = frame(b"x" * 100)
    for byte in data:
        if peer.transport.is_closed or not peer.transport.written:
            break
        peer.send(bytes([byte]))
        await asyncio.sleep(1)
    await asyncio.sleep(CLOSE_SECONDS)
    assert peer.close_code() == TOO_SLOW


@in_virtual_time
async def test_the_end_of_the_server_is_announced() -> None:
    peer = await connected()
    peer.server.shutdown()
    assert peer.close_code() == GOING_AWAY
    assert await peer.server.receive() is None
    await asyncio.sleep(CLOSE_SECONDS + 1)
    assert peer.transport.is_closed


@in_virtual_time
async def test_what_runs_ends_before_the_connection_does_at_the_end_of_the_server() -> None:
    peer = await connected()
    peer.send(frame(b"x"))
    assert await peer.server.receive() == b"x"
    peer.server.shutdown()
    await peer.server.send((b"the last event",))
    peer.server.rest()
    sent = peer.frames()
    assert [each.opcode for each in sent] == [Opcode.TEXT, Opcode.CLOSE]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Version: 8"),
        (b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Sec-WebSocket-Key: short"),
        (b"Host: x", b"Host: x\r\nContent-Length: 5"),
    ],
)
@in_virtual_time
async def test_a_wrong_handshake_is_no_upgrade(old: bytes, new: bytes) -> None:
    peer = Peer(ConnectionBounds(), 64)
    peer.http.data_received(HANDSHAKE.replace(old, new))
    await asyncio.sleep(0.01)
    assert not hasattr(peer, "server")
    assert b" 101 " not in peer.transport.written
