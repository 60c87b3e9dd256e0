"""`/v1/files`: upload, list, retrieve, download and delete. A key sees its own files only."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse

from engine.errors import InvalidRequest
from gateway.errors import BodyTooLarge, BodyTooSlow, FileNotFound, WrongMediaType
from gateway.schema.decoding import check_allowed
from gateway.schema.openai.batches import (
    KEPT_PURPOSES,
    MAX_NAME,
    check_fields,
    expiry_of,
    file_json,
)
from gateway.schema.paging import list_json, read_page
from gateway.service import caller_of, service_of
from gateway.store.files import FileRecord, Files

_FORM_BYTES = 64 << 10  # for the other parts of the form
_MAX_FIELDS = 16
_MIN_BYTES_PER_SECOND = 1 << 20  # a slower upload of a large file may time out
Json = dict[str, Any]
MAX_LISTED = 10_000


class Upload(NamedTuple):
    """One file and the fields beside it."""

    file: UploadFile
    fields: dict[str, str]


@asynccontextmanager
async def read_upload(http: HttpRequest, max_bytes: int, seconds: float) -> AsyncIterator[Upload]:
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


async def _bounded(http: HttpRequest, max_bytes: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for piece in http.stream():
        size += len(piece)
        if size > max_bytes + _FORM_BYTES:
            raise BodyTooLarge(max_bytes, "--max-file-bytes")
        yield piece


async def create_file(http: HttpRequest) -> Json:
    """Store the file of a form. Raises `InvalidRequest` for an invalid form, and before it is
    received `StoreFull` or `StoreOutOfSpace`."""
    service, caller = service_of(http), caller_of(http)
    files = service.store.files
    max_bytes = files.limits.file_bytes
    await files.check_room(caller.tenant, service.unix_now())
    async with read_upload(http, max_bytes, service.limits.seconds) as upload:
        check_fields(upload.fields)
        seconds, now = expiry_of(upload.fields), service.unix_now()
        record = FileRecord(
            id=service.new_id("file-"),
            tenant=caller.tenant,
            filename=(upload.file.filename or "file")[-MAX_NAME:],
            purpose=upload.fields["purpose"],
            num_bytes=0,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
        )
        record = await files.put(record, upload.file.read)
    return file_json(record)


async def list_files(http: HttpRequest) -> Json:
    """A page of the caller's files, newest first by default."""
    service, caller = service_of(http), caller_of(http)
    page = read_page(http.query_params, default=MAX_LISTED, most=MAX_LISTED)
    purpose = http.query_params.get("purpose")
    if purpose is not None:
        check_allowed(purpose, "purpose", KEPT_PURPOSES)
    records = await service.store.files.listed(
        caller.tenant, purpose, service.unix_now(), ascending=page.is_ascending
    )
    records = page.following(records, "file", lambda record: record.id)
    items = [file_json(record) for record in records[: page.limit]]
    return list_json(items, has_more=len(records) > page.limit)


async def retrieve_file(http: HttpRequest) -> Json:
    """The metadata of a file; raises `FileNotFound`."""
    return file_json(await _find(http))


async def delete_file(http: HttpRequest) -> Json:
    """Delete a file; raises `FileNotFound`."""
    service, caller = service_of(http), caller_of(http)
    file_id = http.path_params["file_id"]
    await service.store.files.delete(file_id, caller.tenant, service.unix_now())
    return {"id": file_id, "object": "file", "deleted": True}


async def retrieve_content(http: HttpRequest) -> StreamingResponse:
    """The content of a file; raises `FileNotFound`."""
    record, files = await _find(http), service_of(http).store.files
    if record.num_bytes and await files.piece(record.id, 0) is None:
        raise FileNotFound(record.id)
    headers = {"content-length": str(record.num_bytes)}
    return StreamingResponse(_pieces(record, files), 200, headers, "application/octet-stream")


async def _find(http: HttpRequest) -> FileRecord:
    service, caller = service_of(http), caller_of(http)
    file_id = http.path_params["file_id"]
    return await service.store.files.find(file_id, caller.tenant, service.unix_now())


async def _pieces(record: FileRecord, files: Files) -> AsyncIterator[bytes]:
    """The content, piece by piece."""
    for number in count():
        if (piece := await files.piece(record.id, number)) is None:
            return
        yield piece
