"""Uploads: a multipart form with one file, parsed as it arrives. Large files go to disk."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from engine.errors import InvalidRequest
from gateway.errors import BodyTooLarge, BodyTooSlow, WrongMediaType

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

_FORM_BYTES = 64 << 10  # for the other parts of the form
_MAX_FIELDS = 16
_MIN_BYTES_PER_SECOND = 1 << 20  # a slower upload of a large file may time out


class Upload(NamedTuple):
    """One file and the fields beside it."""

    file: UploadFile
    fields: dict[str, str]


@asynccontextmanager
async def read_upload(http: "HttpRequest", max_bytes: int, seconds: float) -> AsyncIterator[Upload]:
    """The parsed form; its file is deleted when the block ends.

    The form must arrive within `seconds`, plus one second per MiB of `max_bytes`. Raises
    `WrongMediaType`, `BodyTooLarge`, `BodyTooSlow`, and `InvalidRequest` for a malformed form or
    one without exactly one file in the field `file`.
    """
    media_type, _, _ = http.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "multipart/form-data":
        raise WrongMediaType("Send the file as 'multipart/form-data'.")
    seconds += max_bytes / _MIN_BYTES_PER_SECOND
    parser = MultiPartParser(
        http.headers,
        _bounded(http, max_bytes),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=_FORM_BYTES,
    )
    try:
        async with asyncio.timeout(seconds):
            form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"The multipart form is malformed: {error.message}") from error
    except TimeoutError:
        raise BodyTooSlow(seconds) from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest(
                "Missing required parameter: 'file' (a part with a file name).", "file"
            )
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        yield Upload(file, fields)
    finally:
        await form.close()


async def _bounded(http: "HttpRequest", max_bytes: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for piece in http.stream():
        size += len(piece)
        if size > max_bytes + _FORM_BYTES:
            raise BodyTooLarge(max_bytes, "--max-file-bytes")
        yield piece
