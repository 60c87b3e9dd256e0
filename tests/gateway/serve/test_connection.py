"""Limits on headers, trailers and slow clients, in virtual time with a transport that only
records."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from engine.simulated.virtual_loop import run_virtual
from gateway.observe.request_log import RequestLog
from gateway.serve.connection import (
    BODY_BYTES_PER_SECOND,
    GRACE_SECONDS,
    HEAD_SECONDS,
    MAX_HEAD_BYTES,
    MAX_LATE_BYTES,
    MAX_PIPELINED,
    SLICE_BYTES,
    Connection,
    ConnectionBounds,
)
from gateway.serve.places import Place, Places

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class RecordingTransport:
    """Records what is written; its peer never reads."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False
        self.is_lost = False

    def write(self, data: bytes) -> None:
        if self.is_lost:
            raise RuntimeError("unable to perform operation; the handler is closed")  # as uvloop
        self.written += data

    def close(self) -> None:
        self.is_closed = True

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
) -> tuple[Connection, RecordingTransport]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", http=Connection)
    config.load()
    place = place or Places().enter("client")
    assert place is not None
    connection = Connection(
        config, state or ServerState(), {}, bounds=bounds, log=RequestLog(lambda: 0.0), place=place
    )
    peer = RecordingTransport()
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
        connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n")
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


def test_in_a_full_server_a_new_connection_closes_the_oldest_that_has_sent_no_request() -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_while_all_connections_serve_requests_probes_are_answered_and_others_are_a_503() -> None:
    async def main() -> None:
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

    run_virtual(main())


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n"


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
    """The status of the only response, after which the connection was closed."""
    assert peer.is_closed
    assert peer.written.count(b"HTTP/1.1 ") == 1
    return peer.written.split()[1]


def test_headers_that_arrive_in_one_piece_have_the_same_limit() -> None:
    async def main() -> None:
        connection, peer = connect()
        head = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n"
        connection.data_received(head)
        await asyncio.sleep(0)
        assert rejected_with(peer) == b"431"

    run_virtual(main())


@pytest.mark.parametrize("num_pieces", [1, 100])
def test_many_small_trailers_are_a_431_before_the_app_has_the_request(num_pieces: int) -> None:
    """Also if they, and the end of the message, arrive at once."""

    async def main() -> None:
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

    run_virtual(main())


def test_one_trailer_without_end_is_a_431() -> None:
    async def main() -> None:
        connection, peer = connect(app=reply_after_the_body)
        connection.data_received(CHUNKED + b"0\r\na: ")
        for _ in range(MAX_HEAD_BYTES // 1000 + 1):
            connection.data_received(b"b" * 1000)
        await asyncio.sleep(0)
        assert rejected_with(peer) == b"431"

    run_virtual(main())


def test_large_pieces_of_a_chunked_body_are_no_trailers() -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_trailers_do_not_become_headers() -> None:
    async def main() -> None:
        connection, peer = connect(app=reply_after_the_body)
        connection.data_received(CHUNKED + b"0\r\nauthorization: Bearer x\r\n\r\n")
        await asyncio.sleep(1)
        assert peer.written.startswith(b"HTTP/1.1 200 ")
        assert b"host, transfer-encoding" in peer.written
        assert b"authorization" not in peer.written
        connection.connection_lost(None)

    run_virtual(main())


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
def test_ambiguous_or_malformed_framing_is_rejected(status: bytes, request_bytes: bytes) -> None:
    async def main() -> None:
        connection, peer = connect(app=reply_after_the_body)
        connection.data_received(request_bytes)
        await asyncio.sleep(1)
        assert rejected_with(peer) == status
        connection.connection_lost(None)

    run_virtual(main())


def test_http_1_0_needs_no_host() -> None:
    async def main() -> None:
        connection, peer = connect()
        connection.data_received(b"GET / HTTP/1.0\r\n\r\n")
        await asyncio.sleep(1)
        assert peer.written.startswith(b"HTTP/1.1 204 ")
        connection.connection_lost(None)

    run_virtual(main())


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


POST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 40\r\n\r\n" + b"a" * 40
CHUNKED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def test_of_pipelined_requests_only_a_few_are_parsed_before_they_are_answered() -> None:
    async def main() -> None:
        connection, _ = connect(app=reads_on)
        connection.data_received(POST * 5_000)
        await asyncio.sleep(0)
        assert len(connection.pipeline) < MAX_PIPELINED + SLICE_BYTES // len(POST) + 2
        connection.connection_lost(None)
        await asyncio.sleep(0)

    run_virtual(main())


def test_all_pipelined_requests_are_answered() -> None:
    async def main() -> None:
        connection, peer = connect()
        connection.data_received(POST * 3_000 + POST[:20])
        connection.data_received(POST[20:])
        for _ in range(20_000):
            await asyncio.sleep(0.0001)
            if peer.written.count(b"HTTP/1.1 204") == 3_001:
                break
        assert peer.written.count(b"HTTP/1.1 204") == 3_001
        connection.connection_lost(None)

    run_virtual(main())


def test_the_pipelined_requests_of_a_closed_connection_are_freed_at_once() -> None:
    async def main() -> None:
        connection, _ = connect(app=reads_on)
        connection.data_received(POST * 100)
        await asyncio.sleep(0)
        queued = weakref.ref(connection.pipeline[0][0])
        tasks = [*connection.tasks]
        connection.connection_lost(None)
        assert queued() is None
        await asyncio.wait(tasks, timeout=1)
        assert all(task.done() for task in tasks), "the request that runs saw no disconnect"

    gc.collect()
    gc.disable()
    try:
        run_virtual(main())
    finally:
        gc.enable()


async def answers_later(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(1)
    await app(scope, receive, send)


def test_a_response_whose_connection_is_lost_is_not_written_also_if_others_wait_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        connection, peer = connect(app=answers_later)
        connection.data_received(GET * 3)
        await asyncio.sleep(0.5)
        peer.is_closed = peer.is_lost = True
        connection.connection_lost(None)
        await asyncio.sleep(5)
        assert peer.written == b""

    run_virtual(main())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("begin", "endless"), [(b"5;", b"a=b;" * 16_384), (b"", b"1\r\na\r\n" * 40_000)]
)
def test_framing_that_is_larger_than_the_body_is_a_431(begin: bytes, endless: bytes) -> None:
    async def main() -> None:
        connection, peer = connect(app=reads_on)
        connection.data_received(CHUNKED + begin)
        for _ in range(4):
            connection.data_received(endless)
            await asyncio.sleep(60)
        assert rejected_with(peer) == b"431"
        connection.connection_lost(None)
        await asyncio.sleep(0)

    run_virtual(main())


def test_a_body_that_goes_on_after_its_response_closes_the_connection() -> None:
    async def main() -> None:
        connection, peer = connect()
        connection.data_received(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n")
        await asyncio.sleep(0.1)
        assert not peer.is_closed
        connection.data_received(b"a" * (MAX_LATE_BYTES + SLICE_BYTES))
        assert peer.is_closed
        connection.connection_lost(None)

    run_virtual(main())


def test_data_that_is_costly_to_parse_is_parsed_in_parts_with_rests_between_them() -> None:
    async def main() -> None:
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

    run_virtual(main())
