"""`GET /models/sse`: the statuses of all models, and each change, in the form of llama.cpp."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import orjson

from gateway.generation.reply import unless_disconnected
from gateway.groups.changes import Change
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from gateway.service import Service

HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


async def model_events(http: "HttpRequest") -> "ModelEvents":
    """Server-sent events until the client leaves or the server shuts down."""
    service = service_of(http)
    return ModelEvents(service, HEADERS | caller_of(http).headers(service.clock()))


class ModelEvents:
    """An ASGI response: `model_status` for each model, then `status_change` for each change."""

    def __init__(self, service: "Service", headers: dict[str, str]) -> None:
        self._service = service
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Stream until the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        with self._service.groups.changes.watch() as changes:
            await unless_disconnected(receive, partial(self._stream, changes, send), lambda: None)

    async def _stream(self, changes: "asyncio.Queue[Change | None]", send: "Send") -> None:
        statuses = (Change(group.name, group.status) for group in self._service.groups)
        event = b"".join(_event("model_status", each) for each in statuses)
        while event and not self._service.groups.changes.is_ended:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            event = await self._next(changes)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, changes: "asyncio.Queue[Change | None]") -> bytes:
        """The next event, a ping if there is none for a while; empty at the end."""
        try:
            async with asyncio.timeout(self._service.pace.ping):
                change = await changes.get()
        except TimeoutError:
            return b": ping\n\n"
        return b"" if change is None else _event("status_change", change)


def _event(kind: str, change: Change) -> bytes:
    fields = {"model": change.name, "event": kind, "data": {"status": change.status.value}}
    return b"data: " + orjson.dumps(fields) + b"\n\n"
