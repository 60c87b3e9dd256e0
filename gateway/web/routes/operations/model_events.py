"""`GET /models/sse`: the statuses of all models, and each change, in the form of llama.cpp."""

import asyncio
from typing import TYPE_CHECKING

import orjson
from starlette.responses import StreamingResponse

from gateway.generation.event_stream import EVENT_HEADERS
from gateway.groups.changes import Change
from gateway.schema.rendering import END, PING
from gateway.service import service_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request as HttpRequest

    from gateway.service import Service


async def model_events(http: "HttpRequest") -> StreamingResponse:
    """Server-sent events until the client leaves or the server shuts down."""
    return StreamingResponse(_events(service_of(http)), headers=EVENT_HEADERS)


async def _events(service: "Service") -> "AsyncIterator[bytes]":
    """`model_status` for each model, then `status_change` for each change; a ping if there is none
    for a while."""
    with service.groups.changes.watch() as changes:
        for group in service.groups:
            yield _event("model_status", Change(group.name, group.status))
        while not service.groups.changes.is_ended:
            try:
                async with asyncio.timeout(service.pace.ping):
                    change = await changes.get()
            except TimeoutError:
                yield PING
                continue
            if change is None:
                return
            yield _event("status_change", change)


def _event(kind: str, change: Change) -> bytes:
    fields = {"model": change.name, "event": kind, "data": {"status": change.status.value}}
    return b"data: " + orjson.dumps(fields) + END
