"""What clients may send, and how slowly: the bytes and time of a request, and of its parsing."""

import asyncio
from collections.abc import Callable

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from engine.ports import Clock

MAX_HEAD_BYTES = 64 << 10  # request line, headers and trailers
HEAD_SECONDS = 30.0
BODY_BYTES_PER_SECOND = 64 << 10  # a body that arrives at this rate gets more time
GRACE_SECONDS = 5.0  # the route may reject a slow body so long before the connection does
SLICE_BYTES = 2_048  # parsed at a time; it may contain 50 further requests
MAX_LATE_BYTES = 256 << 10  # a connection is closed if more of a body may follow its response
PARSING_SECONDS = 0.002  # parsing the data of one read may take so long at once; more is metered
PARSING_SHARE = 0.1  # share of the loop's time, for all connections whose data takes longer
ENDLESS = 1 << 62  # bytes
_INVALID = "invalid_request_error"
_TOO_SMALL_CHUNKS = "The chunks of the body are too small, or their extensions too long."
_TOO_LARGE = f"The request's headers and trailers are larger than {MAX_HEAD_BYTES} bytes."


class Timer:
    """A call that is due later, if any."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def set(self, seconds: float, then: Callable[[], object]) -> None:
        """Call `then` after so many seconds, and not what was due before."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, self._call, then)

    def stop(self) -> None:
        """Call nothing."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _call(self, then: Callable[[], object]) -> None:
        self._handle = None
        then()


class SharedRate:
    """What all connections of a server together may take per second of something."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._free_at = 0.0

    def delay(self, taken: float, now: float) -> float:
        """How long a connection must rest that has taken so much."""
        self._free_at = max(now, self._free_at) + taken / self._per_second
        return self._free_at - now


class ParsingMeter:
    """The time that connections take whose data is costly to parse, such as chunks of one byte."""

    def __init__(self) -> None:
        self._rate = SharedRate(PARSING_SHARE)

    def parse(
        self,
        data: bytes,
        feed: Callable[[bytes], bool],
        has_room: Callable[[], bool],
        clock: Clock,
    ) -> tuple[bytes, float | None]:
        """Feed the data in slices, until nothing more is wanted, there is no room for more, or it
        has taken too long. Returns the rest, and in the last case for how long it must rest."""
        began = clock()
        for at in range(0, len(data), SLICE_BYTES):
            seconds = clock() - began
            if seconds > PARSING_SECONDS:
                return data[at:], self._rate.delay(seconds, clock())
            if not has_room():
                return data[at:], None
            if not feed(data[at : at + SLICE_BYTES]):
                return data[at + SLICE_BYTES :], None
        return b"", None


class Rejection(Exception):  # it ends the parsing of a request, as its error response
    """The request ends with this error response."""

    def __init__(
        self, status: int, message: str, kind: str = _INVALID, code: str = _INVALID
    ) -> None:
        super().__init__(message)
        self.status = status
        self._fields = {"message": message, "type": kind, "param": None, "code": code}

    def response(self) -> bytes:
        """The whole response, after which the connection is closed."""
        body = orjson.dumps({"error": self._fields})
        retry = b"retry-after: 1\r\n" if self.status == 503 else b""
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        return STATUS_LINE[self.status] + retry + head % len(body) + body


class Arrival:
    """The request that arrives at a connection: the bytes of its head, its trailers and its body's
    framing are limited, and its time."""

    def __init__(
        self, body_seconds: float, reject: Callable[[Rejection], None], close: Callable[[], None]
    ) -> None:
        """`close` ends a connection to which no response is due, or not that of this request."""
        self._body_seconds = body_seconds
        self._reject = reject
        self._close = close
        self._timer = Timer()
        self._timer.set(HEAD_SECONDS, close)
        self._number = 0  # the request's number
        self.is_in_head = False
        self.is_in_body = False
        self._fields_bytes = 0  # the complete request line, headers and trailers
        self._open_bytes = 0  # since a header, trailer or chunk began that is incomplete
        self._chunk = 0  # number of the chunk whose data is awaited, 0 while none is
        self._num_chunks = 0
        self._length: int | None = None  # content-length; None if the body has chunks
        self._body_bytes = 0
        self._body_began_at = 0.0  # loop seconds
        self._overhead_bytes = 0  # the framing of the body: sizes and extensions of chunks

    def begin(self) -> None:
        """The first byte of a request."""
        self._number += 1
        self.is_in_head = True
        self._overhead_bytes = self._body_bytes = 0
        self._fields_bytes = self._chunk = self._num_chunks = 0
        self._length = None
        self._timer.set(HEAD_SECONDS, self._head_is_late)

    def add_field(self, num_bytes: int) -> None:
        """A part of the head, or a trailer. Raises `Rejection` if they are too large."""
        self._fields_bytes += num_bytes
        if self._fields_bytes > MAX_HEAD_BYTES:
            raise Rejection(431, _TOO_LARGE)

    def begin_body(self, headers: list[tuple[bytes, bytes]]) -> None:
        """The head is complete."""
        self.is_in_head, self.is_in_body = False, True
        lengths = [int(value) for name, value in headers if name == b"content-length"]
        is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
        self._length = None if is_chunked else sum(lengths)
        self._body_began_at = asyncio.get_running_loop().time()
        self._timer.set(self._body_seconds + GRACE_SECONDS, self._body_is_late)

    @property
    def num_left(self) -> int:
        """Bytes of the body that have not arrived; very many if it does not say."""
        return ENDLESS if self._length is None else self._length - self._body_bytes

    def begin_chunk(self) -> None:
        """The header of a chunk of the body."""
        self._num_chunks += 1
        self._chunk = self._num_chunks

    def add_body(self, num_bytes: int) -> None:
        """A part of the body."""
        self._chunk = 0
        self._body_bytes += num_bytes

    def end(self) -> None:
        """The request is complete, or rejected."""
        self._timer.stop()
        self._chunk = 0
        self.is_in_head = self.is_in_body = False

    def feed(self, data: bytes, parse: Callable[[bytes], None]) -> None:
        """Parse data, which calls the methods above, and reject a request whose framing is larger
        than its body, or a part of which is too large."""
        before, number, num_body_bytes = self._awaited, self._number, self._body_bytes
        was_in_body = self.is_in_body
        parse(data)
        if was_in_body and self.is_in_body and number == self._number:
            self._overhead_bytes += len(data) - (self._body_bytes - num_body_bytes)
            if self._overhead_bytes > MAX_HEAD_BYTES + self._body_bytes:
                self._reject(Rejection(431, _TOO_SMALL_CHUNKS))
        is_same = self._awaited is not None and self._awaited == before
        self._open_bytes = self._open_bytes + len(data) if is_same else 0
        if self._open_bytes > MAX_HEAD_BYTES:
            self._reject(Rejection(431, _TOO_LARGE))

    @property
    def _awaited(self) -> tuple[str, int] | None:
        """The part of a request that is incomplete: its head, or what follows the header of a
        chunk, which is data, or trailers if the chunk is the last one."""
        if self.is_in_head:
            return ("head", self._number)
        return ("chunk", self._chunk) if self._chunk else None

    def _head_is_late(self) -> None:
        message = f"The request's headers did not arrive within {HEAD_SECONDS:g} seconds."
        self._reject(Rejection(408, message))

    def _body_is_late(self) -> None:
        """Close, unless the body's size so far earns it more time."""
        earned = self._body_bytes / BODY_BYTES_PER_SECOND
        until = self._body_began_at + self._body_seconds + GRACE_SECONDS + earned
        left = until - asyncio.get_running_loop().time()
        if left > 0:
            self._timer.set(left, self._body_is_late)
        else:
            self._close()


def check_framing(headers: list[tuple[bytes, bytes]], version: str) -> None:
    """Raises `Rejection` unless there is one Host (HTTP/1.0: at most one), and no transfer coding
    but chunked."""
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version != "1.0"):
        raise Rejection(400, f"A request must have one Host header, not {hosts}.")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        shown = b", ".join(codings)[:100].decode("latin-1")
        raise Rejection(501, f"Transfer-Encoding {shown!r} is not supported; send 'chunked'.")
