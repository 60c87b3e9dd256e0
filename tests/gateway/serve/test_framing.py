import asyncio
from typing import Any

import pytest

from gateway.observe.request_log import RequestLog
from gateway.serve.arrival import MAX_HEAD_BYTES
from tests.gateway.scenes import in_virtual_time
from tests.gateway.serve.recording import (
    CHUNKED,
    ENDLESS,
    connect,
    reads_on,
    rejected_with,
    reply_after_the_body,
)


@pytest.mark.parametrize("num_pieces", [1, 100])
@in_virtual_time
async def test_many_small_trailers_are_a_431_before_the_app_has_the_request(
    num_pieces: int,
) -> None:
    """Also if they, and the end of the message, arrive at once."""
    connection, peer = connect(app=reply_after_the_body)
    connection.data_received(CHUNKED + b"0\r\n")
    trailers = [b"a: " + b"b" * 1000 + b"\r\n"] * 100
    trailers[-1] += b"\r\n"
    size = len(trailers) // num_pieces
    for first in range(0, len(trailers), size):
        if not peer.is_closed:
            connection.data_received(b"".join(trailers[first : first + size]))
    await asyncio.sleep(0)
    assert rejected_with(peer) == b"431"


@in_virtual_time
async def test_one_trailer_without_end_is_a_431() -> None:
    connection, peer = connect(app=reply_after_the_body)
    connection.data_received(CHUNKED + b"0\r\na: ")
    for _ in range(MAX_HEAD_BYTES // 1000 + 1):
        connection.data_received(b"b" * 1000)
    await asyncio.sleep(0)
    assert rejected_with(peer) == b"431"


@in_virtual_time
async def test_large_pieces_of_a_chunked_body_are_no_trailers() -> None:
    connection, peer = connect(app=reply_after_the_body)
    connection.data_received(CHUNKED)
    for _ in range(20):  # each piece ends behind the header of the next chunk
        connection.data_received(b"8000\r\n" + b"x" * 0x8000 + b"\r\n4\r\n")
        connection.data_received(b"abcd\r\n")
        await asyncio.sleep(0)
    connection.data_received(b"0\r\n\r\n")
    await asyncio.sleep(1)
    assert peer.written.startswith(b"HTTP/1.1 200 ")
    connection.connection_lost(None)


@in_virtual_time
async def test_trailers_do_not_become_headers() -> None:
    connection, peer = connect(app=reply_after_the_body)
    connection.data_received(CHUNKED + b"0\r\nauthorization: Bearer x\r\n\r\n")
    await asyncio.sleep(1)
    assert peer.written.startswith(b"HTTP/1.1 200 ")
    assert b"host, transfer-encoding" in peer.written
    assert b"authorization" not in peer.written
    connection.connection_lost(None)


@pytest.mark.parametrize(
    ("status", "request_bytes"),
    [
        (b"400", b"GET / HTTP/1.1\r\n\r\n"),
        (b"400", b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n"),
        (b"400", b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n"),
        (b"501", b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n"),
        (b"501", b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n"),
        (b"400", CHUNKED + b"xyz\r\n"),
        (b"400", CHUNKED + b"2\r\nhello\r\n"),
    ],
)
@in_virtual_time
async def test_ambiguous_or_malformed_framing_is_rejected(
    status: bytes, request_bytes: bytes
) -> None:
    connection, peer = connect(app=reply_after_the_body)
    connection.data_received(request_bytes)
    await asyncio.sleep(1)
    assert rejected_with(peer) == status
    connection.connection_lost(None)


@in_virtual_time
async def test_http_1_0_needs_no_host() -> None:
    connection, peer = connect()
    connection.data_received(b"GET / HTTP/1.0\r\n\r\n")
    await asyncio.sleep(1)
    assert peer.written.startswith(b"HTTP/1.1 204 ")
    connection.connection_lost(None)


@in_virtual_time
async def test_a_body_of_unknown_length_ends_with_the_connection_for_http_1_0() -> None:
    """HTTP/1.0 has no chunks: a client would read their sizes as part of the body."""

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for event in (b"data: 1\n\n", b"data: 2\n\n"):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body"})

    connection, peer = connect(app=stream)
    connection.data_received(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    await asyncio.sleep(1)
    head, _, body = peer.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"data: 1\n\ndata: 2\n\n"
    assert peer.is_closed
    connection.connection_lost(None)


@in_virtual_time
async def test_http_1_0_gets_the_length_of_a_body_that_has_one() -> None:
    async def reply(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ab", "more_body": False})

    connection, peer = connect(app=reply)
    connection.data_received(b"GET / HTTP/1.0\r\n\r\n")
    await asyncio.sleep(1)
    assert b"content-length: 2\r\n" in peer.written
    assert peer.written.endswith(b"\r\n\r\nab")
    connection.connection_lost(None)


@pytest.mark.parametrize(
    ("begin", "endless"), [(b"5;", b"a=b;" * 16_384), (b"", b"1\r\na\r\n" * 40_000)]
)
@in_virtual_time
async def test_framing_that_is_larger_than_the_body_is_a_431(begin: bytes, endless: bytes) -> None:
    connection, peer = connect(app=reads_on)
    connection.data_received(ENDLESS + begin)
    while not peer.is_closed:
        connection.data_received(endless)
        await asyncio.sleep(6)
    assert rejected_with(peer) == b"431"
    connection.connection_lost(None)
    await asyncio.sleep(0)


@in_virtual_time
async def test_data_that_is_costly_to_parse_is_parsed_in_parts_with_rests_between_them() -> None:
    connection, peer = connect()
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    connection._log = RequestLog(clock)
    fields = b"".join(b"a%d: b\r\n" % i for i in range(2_000))
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n")
    assert connection._unparsed
    await asyncio.sleep(20)
    assert peer.written.startswith(b"HTTP/1.1 204")
    connection.connection_lost(None)
