"""Limits on headers, trailers and slow clients, in virtual time with a transport that only
records."""

import asyncio
import weakref
from typing import Any

import pytest

from engine.simulated.virtual_loop import run_virtual
from gateway.serve.arrival import (
    BODY_BYTES_PER_SECOND,
    GRACE_SECONDS,
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
)
from gateway.serve.connection import ConnectionBounds
from gateway.serve.linger import LINGER_SECONDS
from gateway.serve.places import Places
from tests.gateway.scenes import in_virtual_time
from tests.gateway.serve.recording import (
    CHUNKED,
    GET,
    connect,
    reads_on,
    rejected_with,
    reply_after_the_body,
    without_collector,
)


@in_virtual_time
async def test_a_connection_that_sends_nothing_is_closed() -> None:
    _, peer = connect()
    await asyncio.sleep(HEAD_SECONDS - 1)
    assert not peer.is_closed
    await asyncio.sleep(1.5)
    assert peer.is_closed
    assert peer.written == b""


@in_virtual_time
async def test_request_headers_that_arrive_too_slowly_are_a_408() -> None:
    connection, peer = connect()
    for byte in b"GET / HTTP/1.1\r\nx: yyyyyyyyyyyyyyyyyy":
        if not peer.is_closed:
            connection.data_received(bytes([byte]))
        await asyncio.sleep(1)
    assert rejected_with(peer) == b"408"
    await asyncio.sleep(LINGER_SECONDS)
    assert peer.is_closed


@in_virtual_time
async def test_request_headers_without_end_are_a_431() -> None:
    connection, peer = connect()
    connection.data_received(b"GET / HTTP/1.1\r\nx: ")
    for _ in range(MAX_HEAD_BYTES // 1000 + 1):
        connection.data_received(b"y" * 1000)
    assert rejected_with(peer) == b"431"
    connection.connection_lost(None)


@in_virtual_time
async def test_a_request_in_time_is_answered_and_the_connection_stays() -> None:
    connection, peer = connect()
    for _ in range(2):
        connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(3)
    assert peer.written.count(b"HTTP/1.1 204 ") == 2
    assert not peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_a_body_that_arrives_too_slowly_closes_the_connection() -> None:
    connection, peer = connect(ConnectionBounds(body_seconds=10.0), app=reads_on)
    connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    for _ in range(14):
        connection.data_received(b"y")
        await asyncio.sleep(1)
    assert not peer.is_closed
    await asyncio.sleep(GRACE_SECONDS - 3.5)
    assert peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_a_long_body_may_take_longer_if_it_keeps_coming() -> None:
    connection, peer = connect(ConnectionBounds(body_seconds=1.0), app=reads_on)
    connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
    for _ in range(30):
        connection.data_received(b"y" * BODY_BYTES_PER_SECOND)
        await asyncio.sleep(1)
    assert not peer.is_closed
    await asyncio.sleep(GRACE_SECONDS + 2)
    assert peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_a_response_that_is_not_read_closes_the_connection() -> None:
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


@in_virtual_time
async def test_in_a_full_server_a_new_connection_closes_the_oldest_that_has_sent_no_request() -> (
    None
):
    places = Places(max_connections=2)
    served, to_served = connect(place=places.enter("a"))
    _, unused = connect(place=places.enter("a"))
    served.data_received(GET)
    _, late = connect(place=places.enter("b"))
    assert unused.is_closed
    assert not late.is_closed
    await asyncio.sleep(1)
    assert to_served.written.startswith(b"HTTP/1.1 204 ")
    connect(place=places.enter("b"))
    assert late.is_closed, "before the one that had a request"
    served.connection_lost(None)


@in_virtual_time
async def test_while_all_connections_serve_requests_probes_are_answered_and_others_are_a_503() -> (
    None
):
    places, bounds = Places(max_connections=1), ConnectionBounds(probes=frozenset({b"/health"}))
    busy, peer = connect(app=reads_on, place=places.enter("a"))
    busy.data_received(GET)
    probe, to_probe = connect(bounds, place=places.enter("b"))
    probe.data_received(GET.replace(b"/", b"/health?x", 1))
    other, to_other = connect(bounds, place=places.enter("c"))
    other.data_received(GET)
    await asyncio.sleep(1)
    assert to_probe.written.startswith(b"HTTP/1.1 204 ")
    assert to_other.written.startswith(b"HTTP/1.1 503 ")
    assert b'"overloaded"' in to_other.written
    assert to_other.is_closed
    assert not peer.is_closed
    for each in (busy, probe, other):
        each.connection_lost(None)
    assert places.num_open == 0


@in_virtual_time
async def test_headers_that_arrive_in_one_piece_have_the_same_limit() -> None:
    connection, peer = connect()
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n"
    connection.data_received(head)
    await asyncio.sleep(0)
    assert rejected_with(peer) == b"431"


@pytest.mark.parametrize("ending", [b"\r\n", b"a: b\r\n\r\n", b"a: " + b"b" * 70_000 + b"\r\n\r\n"])
def test_a_closed_connection_is_freed_without_the_garbage_collector(ending: bytes) -> None:
    async def main() -> None:
        connection, peer = connect(app=reply_after_the_body)
        connection.data_received(CHUNKED + b"0\r\n" + ending)
        await asyncio.sleep(1)
        connection.connection_lost(None)
        await asyncio.sleep(1)
        left = weakref.ref(connection)
        del connection
        assert left() is None
        assert peer.written

    with without_collector():
        run_virtual(main())


@pytest.mark.parametrize(
    ("expected", "request_bytes"),
    [
        ("method=GET path=/a status=400", b"GET /a?b=c HTTP/1.1\r\n\r\n"),
        ("method=- path=- status=400", b"no http\r\n\r\n"),
        ("method=POST path=/ status=400", CHUNKED.replace(b"hi", b"h") + b"xyz\r\n"),
    ],
)
def test_a_request_rejected_by_the_connection_is_one_line(
    expected: str, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The app logs a request that it has got; here the app is not ours, so the scope says it."""
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await reply_after_the_body(scope, receive, send)

    async def main() -> None:
        connection, _ = connect(app=app)
        connection.data_received(request_bytes)
        await asyncio.sleep(1)
        connection.connection_lost(None)

    with caplog.at_level("INFO", "gateway.observe.request_log"):
        run_virtual(main())
    lines = [m for m in caplog.messages if m.startswith("id=")]
    lines += [f"method=POST path=/ status={scope['podway.rejection'][0]}" for scope in scopes]
    assert len(lines) == 1
    assert expected in lines[0]


@in_virtual_time
async def test_a_body_that_goes_on_after_its_response_ends_the_connection() -> None:
    connection, peer = connect()
    connection.data_received(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n")
    await asyncio.sleep(0.1)
    connection.data_received(b"a" * 9_999_998)
    assert not peer.is_closed
    connection.data_received(b"a" + GET)
    await asyncio.sleep(0.1)
    assert peer.is_closed
    assert peer.written.count(b"HTTP/1.1 ") == 1
    connection.connection_lost(None)


async def test_chunks_are_written_as_send_writes_them_while_that_need_not_wait() -> None:
    scopes: list[Any] = []

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one event", "more_body": True})
        await receive()

    connection, peer = connect(app=streams)
    connection.data_received(GET)
    await asyncio.sleep(0)
    chunks = scopes[0]["podway.chunks"]
    before, sent = peer.written, peer.written.partition(b"\r\n\r\n")[2]
    assert chunks.is_open
    chunks.write(b"one event")
    assert peer.written == before + sent
    connection.pause_writing()
    assert not chunks.is_open
    connection.resume_writing()
    assert chunks.is_open
    connection.connection_lost(None)
    assert not chunks.is_open


async def test_nothing_is_written_in_chunks_with_http_1_0() -> None:
    scopes: list[Any] = []

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()

    connection, _ = connect(app=streams)
    connection.data_received(GET.replace(b"1.1", b"1.0"))
    await asyncio.sleep(0)
    assert "podway.chunks" not in scopes[0]
    connection.connection_lost(None)
