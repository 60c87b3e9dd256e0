import asyncio
import json
import socket
from typing import Any

import pytest

from gateway.serve.arrival import MAX_LATE_BYTES, SharedRate
from gateway.serve.connection import ConnectionBounds
from gateway.serve.linger import BYTES_PER_SECOND, LINGER_SECONDS, MAX_LINGER_BYTES
from gateway.serve.places import Places
from tests.gateway.rig import Setting
from tests.gateway.scenes import in_virtual_time
from tests.gateway.serve.live import listening
from tests.gateway.serve.recording import (
    GET,
    RecordingTransport,
    connect,
    reply_after_the_body,
)

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999\r\n\r\n"
PIECE = bytes(256 << 10)
MAX_BYTES = 100_000


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """Responds without reading the body."""
    headers = [(b"content-length", b"3")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b"no!"})


@pytest.mark.parametrize("framing", ["content-length: {}", "transfer-encoding: chunked"])
def test_a_client_that_sends_its_whole_body_before_it_reads_sees_the_response(framing: str) -> None:
    size = 40 * MAX_BYTES
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{framing.format(size)}\r\n\r\n"
    )
    body = b"a" * size
    if "chunked" in framing:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
    with (
        listening(Setting(max_body_bytes=MAX_BYTES)) as live,
        live.connect() as client,
    ):
        client.sendall(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
        response = b"".join(iter(lambda: client.recv(1 << 16), b""))
    status, _, text = response.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in status.lower()
    message = json.loads(text)["error"]["message"]
    assert "100,000 bytes that --max-body-bytes allows" in message
    assert "/v1/files" in message


@pytest.mark.parametrize(
    ("field", "status"),
    [("transfer-encoding: gzip", 501), ("host: other", 400), ("x: " + "y" * 2_000_000, 431)],
)
def test_a_client_that_sends_a_body_behind_a_rejected_head_sees_the_error(
    field: str, status: int
) -> None:
    head = f"POST / HTTP/1.1\r\nhost: localhost\r\n{field}\r\n\r\n".encode()
    with listening(Setting()) as live, live.connect() as client:
        client.sendall(head + bytes(8 << 20))
        response = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert response.startswith(b"HTTP/1.1 %d " % status)


def head_of(framing: str) -> bytes:
    return f"POST / HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode()


@in_virtual_time
@pytest.mark.parametrize(
    "framing",
    [
        f"content-length: {MAX_LATE_BYTES + 1}",
        "transfer-encoding: chunked",
        "content-length: 9\r\nexpect: 100-continue",
    ],
)
async def test_a_response_before_a_body_that_may_not_follow_says_that_the_connection_closes(
    framing: str,
) -> None:
    connection, peer = connect(app=refuses)
    connection.data_received(head_of(framing))
    await asyncio.sleep(0)
    assert b"\r\nconnection: close\r\n" in peer.written
    connection.connection_lost(None)


@in_virtual_time
async def test_a_connection_whose_large_body_was_read_stays_open() -> None:
    connection, peer = connect(app=reply_after_the_body)
    for _ in range(2):
        connection.data_received(head_of(f"content-length: {4 * len(PIECE)}"))
        for _ in range(4):
            await asyncio.sleep(0.1)
            connection.data_received(PIECE)
        await asyncio.sleep(1)
    assert peer.written.count(b" 200 ") == 2
    assert b"connection: close" not in peer.written
    assert not peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_a_connection_is_closed_once_the_body_that_is_thrown_away_is_over() -> None:
    connection, peer = connect(app=refuses)
    connection.data_received(head_of(f"content-length: {4 * len(PIECE)}"))
    for _ in range(3):
        connection.data_received(PIECE)
    await asyncio.sleep(0)
    connection.data_received(PIECE[1:])
    assert not peer.is_closed
    connection.data_received(b"a")
    assert peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_a_request_behind_the_last_response_is_not_served() -> None:
    paths = []

    async def ends(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await asyncio.sleep(1)
        headers = [(b"content-length", b"2"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    connection, peer = connect(app=ends)
    connection.data_received(GET + HEAD)
    await asyncio.sleep(3)
    assert paths == ["/"]
    assert peer.written.count(b"HTTP/1.1 ") == 1
    assert peer.has_written_eof
    connection.connection_lost(None)


@in_virtual_time
async def test_an_app_that_fails_behind_its_response_finds_a_lost_connection() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await refuses(scope, receive, send)
        await asyncio.sleep(1)
        raise RuntimeError("after the response")

    connection, peer = connect(app=fails)
    connection.data_received(GET)
    (running,) = connection.tasks
    await asyncio.sleep(0)
    peer.abort()
    connection.connection_lost(None)
    await running


@in_virtual_time
async def test_what_is_thrown_away_is_bounded_for_a_connection() -> None:
    connection, peer = connect(app=refuses)
    connection.data_received(HEAD)
    await asyncio.sleep(0)
    for sent in range(0, MAX_LINGER_BYTES, len(PIECE)):
        assert not peer.is_closed, sent
        connection.data_received(PIECE)
    assert peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_connections_share_a_rate_at_which_bytes_are_thrown_away() -> None:
    class Pausing(RecordingTransport):
        is_reading = True

        def pause_reading(self) -> None:
            self.is_reading = False

        def resume_reading(self) -> None:
            self.is_reading = True

    bounds = ConnectionBounds(linger_rate=SharedRate(BYTES_PER_SECOND))
    clients = [connect(bounds, app=refuses, peer=Pausing()) for _ in range(3)]
    for connection, _ in clients:
        connection.data_received(HEAD)
    await asyncio.sleep(0)
    num_bytes = 0
    for _ in range(1000):
        for connection, peer in clients:
            if peer.is_reading:  # type: ignore[attr-defined]
                connection.data_received(PIECE)
                num_bytes += len(PIECE)
        await asyncio.sleep(0.001)
    assert num_bytes <= BYTES_PER_SECOND + len(clients) * len(PIECE)
    assert num_bytes > BYTES_PER_SECOND / 2
    for connection, _ in clients:
        connection.connection_lost(None)


@in_virtual_time
async def test_a_client_that_neither_sends_nor_leaves_is_closed_after_a_while() -> None:
    connection, peer = connect(app=refuses)
    connection.data_received(HEAD)
    await asyncio.sleep(LINGER_SECONDS - 1)
    assert not peer.is_closed
    await asyncio.sleep(2)
    assert peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_a_connection_whose_request_was_whole_is_closed_at_once() -> None:
    connection, peer = connect(app=refuses)
    connection.data_received(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    await asyncio.sleep(0)
    assert peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_a_new_connection_takes_the_place_of_one_that_only_sends_on() -> None:
    places = Places(max_connections=1)
    connection, peer = connect(app=refuses, place=places.enter("a"))
    connection.data_received(HEAD)
    await asyncio.sleep(0)
    assert not peer.is_closed
    assert places.enter("b") is not None
    assert peer.is_closed
    connection.connection_lost(None)
