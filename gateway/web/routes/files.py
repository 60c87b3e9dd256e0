"""`/v1/files`: upload, list, retrieve, download and delete. A key sees its own files only."""

from typing import TYPE_CHECKING, Any

from gateway.errors import FileNotFound
from gateway.generation.reply import unless_disconnected
from gateway.schema.decoding import check_allowed, invalid
from gateway.schema.openai.files import KEPT_PURPOSES, MAX_NAME, check_fields, expiry_of, file_json
from gateway.schema.paging import list_json, read_page
from gateway.service import caller_of, service_of
from gateway.store.files import FileRecord
from gateway.web.upload import read_upload

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from gateway.access.callers import Caller
    from gateway.service import Service

Json = dict[str, Any]
MAX_LISTED = 10_000


async def create_file(http: "HttpRequest") -> Json:
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


async def list_files(http: "HttpRequest") -> Json:
    """A page of the caller's files, newest first by default."""
    service, caller = service_of(http), caller_of(http)
    page = read_page(http.query_params, default=MAX_LISTED, most=MAX_LISTED)
    purpose = http.query_params.get("purpose")
    if purpose is not None:
        check_allowed(purpose, "purpose", KEPT_PURPOSES)
    records = await service.store.files.listed(
        caller.tenant, purpose, service.unix_now(), ascending=page.is_ascending
    )
    if page.after is not None:
        ids = [record.id for record in records]
        if page.after not in ids:
            raise invalid("after", f"no file {page.after[:100]!r}.")
        records = records[ids.index(page.after) + 1 :]
    items = [file_json(record) for record in records[: page.limit]]
    return list_json(items, has_more=len(records) > page.limit)


async def retrieve_file(http: "HttpRequest") -> Json:
    """The metadata of a file; raises `FileNotFound`."""
    return file_json(await _find(http))


async def delete_file(http: "HttpRequest") -> Json:
    """Delete a file; raises `FileNotFound`."""
    service, caller = service_of(http), caller_of(http)
    file_id = http.path_params["file_id"]
    await service.store.files.delete(file_id, caller.tenant, service.unix_now())
    return {"id": file_id, "object": "file", "deleted": True}


async def retrieve_content(http: "HttpRequest") -> "FileContent":
    """The content of a file; raises `FileNotFound`."""
    return FileContent(await _find(http), caller_of(http), service_of(http))


async def _find(http: "HttpRequest") -> FileRecord:
    service, caller = service_of(http), caller_of(http)
    file_id = http.path_params["file_id"]
    return await service.store.files.find(file_id, caller.tenant, service.unix_now())


class FileContent:
    """The ASGI response of a file, sent piece by piece until the client disconnects."""

    def __init__(self, record: FileRecord, caller: "Caller", service: "Service") -> None:
        self._record = record
        self._caller = caller
        self._service = service

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        await unless_disconnected(receive, lambda: self._send_all(send), lambda: None)

    async def _send_all(self, send: "Send") -> None:
        files, number = self._service.store.files, 0
        piece = await files.piece(self._record.id, 0)
        if piece is None and self._record.num_bytes:
            raise FileNotFound(self._record.id)
        headers = {
            **self._caller.headers(self._service.clock()),
            "content-type": "application/octet-stream",
            "content-length": str(self._record.num_bytes),
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        while piece is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            number += 1
            piece = await files.piece(self._record.id, number)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
