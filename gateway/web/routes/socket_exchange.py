"""SocketExchange: one message of a WebSocket as an HTTP request, whose response is messages."""

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import orjson

from gateway.access.bodies import PIECE_BYTES

if TYPE_CHECKING:
    from starlette.types import Message as AsgiMessage

    from gateway.generation.turn import Turn
    from gateway.web.routes.response_socket import TextSocket

# Headers of the handshake that are not those of each request.
_OF_HANDSHAKE = (
    b"upgrade", b"connection", b"content-length", b"content-type", b"transfer-encoding",
    b"x-request-id", b"idempotency-key", b"last-event-id", b"x-conversation-id",
)  # fmt: skip
_PREFIX = b"sec-websocket-"
_DATA = b"\ndata: "


class SocketExchange:
    """The request of a message, and the events of its response."""

    def __init__(
        self, text: bytes, stream_id: str | None, socket: "TextSocket", ended: asyncio.Event
    ) -> None:
        self.status = 0  # the response's status
        self._text = memoryview(text)
        self._socket = socket
        self._ended = ended  # set when the connection has ended
        self._suffix = b"}"  # ends each event
        if stream_id is not None:
            self._suffix = b',"stream_id":%b}' % orjson.dumps(stream_id)
        self._error = b""

    def scope_like(self, handshake: Mapping[str, Any], turn: "Turn") -> MutableMapping[str, Any]:
        """The scope of a request with the client and the headers of the handshake."""
        headers = [
            (name, value)
            for name, value in handshake["headers"]
            if name not in _OF_HANDSHAKE and not name.startswith(_PREFIX)
        ]
        own = ("type", "asgi", "http_version", "server", "client", "scheme", "root_path")
        return {
            **{name: handshake[name] for name in own},
            "method": "POST",
            "path": handshake["path"],
            "raw_path": handshake["path"].encode(),
            "query_string": b"",
            "headers": [*headers, (b"content-type", b"application/json")],
            "podway.turn": turn,
        }

    async def receive(self) -> "AsgiMessage":
        """The message as a body, in pieces between which others run; then, once the connection has
        ended, the disconnect."""
        if self._text:
            await asyncio.sleep(0)
            piece, self._text = self._text[:PIECE_BYTES], self._text[PIECE_BYTES:]
            more = len(self._text) > 0
            return {"type": "http.request", "body": bytes(piece), "more_body": more}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: "AsgiMessage") -> None:
        """Send what the response adds: its events, or an error once it is whole."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        body: bytes = message.get("body", b"")
        if self.status != 200:
            self._error += body
            if not message.get("more_body", False):
                await self._socket.send((self._error_event(),))
            return
        events = [
            event[event.index(_DATA) + len(_DATA) : -1] + self._suffix
            for event in body.split(b"\n\n")
            if _DATA in event
        ]
        if events:
            await self._socket.send(events)
        elif body:
            self._socket.ping()

    def _error_event(self) -> bytes:
        fields = b'{"type":"error","status":%d,%b' % (self.status, self._error.strip()[1:-1])
        return fields + self._suffix
