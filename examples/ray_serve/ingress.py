"""HTTP requests as values that can be sent to a replica, and an ASGI app that sends them."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.routing import Mount

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY_BYTES = 16 << 20
TOO_LARGE = b'{"error":{"message":"The request body is too large.","type":"invalid_request_error"}}'


@dataclass(frozen=True, slots=True)
class Request:
    """A whole HTTP request."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes

    @classmethod
    def of(cls, scope: "Scope", body: bytes) -> "Request":
        """A request from its ASGI scope, with the path as the client sent it."""
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        return cls(scope["method"], path, scope["query_string"], headers, scope["client"], body)

    def scope(self) -> "Scope":
        """The ASGI scope for the replica's app."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


def responses_through(answer: Any) -> "ASGIApp":
    """An app whose responses are those of `answer`, a streaming method of a deployment handle."""

    async def app(scope: "Scope", receive: "Receive", send: "Send") -> None:
        body = await _read(receive)
        if body is None:
            await _send_too_large(send)
            return
        response = answer.remote(Request.of(scope, body))
        sending = asyncio.create_task(_forward(response, send))
        leaving = asyncio.create_task(_disconnected(receive))
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        has_left = not sending.done()
        if has_left:
            response.cancel()  # the replica's generator ends, and the request with it
        for task in (sending, leaving):
            task.cancel()
        await asyncio.wait((sending, leaving))
        if not has_left:
            sending.result()
        elif not sending.cancelled():
            sending.exception()  # of the cancellation

    return Starlette(routes=[Mount("/", app=app)])


async def _read(receive: "Receive") -> bytes | None:
    """The body; None if it is longer than `MAX_BODY_BYTES`."""
    pieces, size = [], 0
    while True:
        message = await receive()
        piece = message.get("body", b"")
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            return b"".join(pieces)


async def _forward(response: Any, send: "Send") -> None:
    async for message in response:
        await send(message)


async def _disconnected(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_too_large(send: "Send") -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": TOO_LARGE})
