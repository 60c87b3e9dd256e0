"""Bodies of HTTP requests: read whole, within limits on their size and on what JSON contains."""

import asyncio
import re
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope

from gateway.errors import BodyTooLarge, BodyTooSlow, TooManyValues, WrongMediaType

MAX_COMMAS = 1 << 18  # commas in a JSON body
MAX_OBJECTS = 20_000  # with fields: the messages that a chat may have, and more
MAX_ESCAPES = 1 << 20  # backslashes, each of which escapes a character of a text
PIECE_BYTES = 64 << 10  # values are counted in pieces of this size
_OBJECT = re.compile(rb'\{\s*"')


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Maximum size of a request body, and the timeout for receiving it.

    The others bound what a JSON body contains, since decoding it blocks the event loop, also in a
    thread: about 50 ns for each value (of which there are no more than commas, those in texts
    too), 500 ns for an object with fields and 5 to 12 ns for an escape in a text.
    """

    max_bytes: int = 16 << 20
    seconds: float = 60.0
    max_commas: int = MAX_COMMAS
    max_objects: int = MAX_OBJECTS
    max_escapes: int = MAX_ESCAPES


class ValueCount:
    """Counts what a JSON text contains, piece by piece."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._commas = self._objects = self._escapes = 0

    def add(self, piece: bytes) -> None:
        """Raises `TooManyValues`. A piece of 64 KiB takes up to 3 ms."""
        self._commas += piece.count(b",")
        self._objects += len(_OBJECT.findall(piece))
        self._escapes += piece.count(b"\\")
        for name, count, most in (
            ("commas", self._commas, self._limits.max_commas),
            ("objects", self._objects, self._limits.max_objects),
            ("backslashes", self._escapes, self._limits.max_escapes),
        ):
            if count > most:
                raise TooManyValues(name, most)


def count_values(text: bytes, limits: BodyLimits) -> None:
    """Raises `TooManyValues` for a whole text; a thread that counts lets others run meanwhile."""
    values = ValueCount(limits)
    for at in range(0, len(text), PIECE_BYTES):
        values.add(text[at : at + PIECE_BYTES])


class ReadRequest(HttpRequest):
    """A request whose body has been read by `read_body`."""

    def __init__(self, scope: Scope, receive: Receive, body: bytes) -> None:
        super().__init__(scope, receive)
        self.read = body


async def read_body(
    http: HttpRequest, limits: BodyLimits, media_type: str | None = "application/json"
) -> bytes:
    """The whole body, which must be of `media_type` if one is given.

    Raises `WrongMediaType`, `BodyTooLarge` (from `Content-Length`, if there is one),
    `TooManyValues` or `BodyTooSlow`.
    """
    if isinstance(http, ReadRequest):
        return http.read
    if media_type is not None:
        _check_media_type(http)
    _check_length(http.headers.get("content-length"), limits.max_bytes)
    try:
        async with asyncio.timeout(limits.seconds):
            return await _receive(http, limits, counts_values=media_type is not None)
    except TimeoutError:
        raise BodyTooSlow(limits.seconds) from None


async def _receive(http: HttpRequest, limits: BodyLimits, *, counts_values: bool) -> bytes:
    pieces: list[bytes] = []
    size, values = 0, ValueCount(limits)
    async for piece in http.stream():
        size += len(piece)
        if size > limits.max_bytes:
            raise BodyTooLarge(limits.max_bytes)
        if counts_values:
            values.add(piece)
        pieces.append(piece)
    return b"".join(pieces)


def _check_media_type(http: HttpRequest) -> None:
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise WrongMediaType(f"Content-Encoding {encoding!r} is not supported; send plain JSON.")
    media_type = http.headers.get("content-type")
    if media_type is None:
        return
    essence, _, parameters = media_type.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if essence.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise WrongMediaType(
            f"Content-Type {media_type[:100]!r} is not supported; send 'application/json'."
        )


def _check_length(declared: str | None, max_bytes: int) -> None:
    if declared is not None and declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise BodyTooLarge(max_bytes)
