"""Checks every response of an ASGI app against the schemas of `tests.wire.openai_shapes`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from tests.wire.openai_shapes import chunk_complaints, whole_complaints

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ON_EVERY_RESPONSE = ("x-request-id", "openai-processing-ms", "openai-version")
CLIENT_GONE = 499
_ERRORS = (b'{"error"', b'{"type":"error"')


class ResponseCheck:
    """Checks one response; `complaints` has what was wrong with the messages so far."""

    def __init__(self, method: str, path: str) -> None:
        self.complaints: list[str] = []
        self._method = method
        self._path = path
        self._is_preflight = method == "OPTIONS"  # answered by CORS
        self._status = 0
        self._media_type = ""
        self._rest = b""

    def take(self, message: "Message") -> None:
        """Check the next message of the app."""
        if self._is_preflight:
            return
        if message["type"] == "http.response.start":
            self._take_head(message)
        elif message["type"] == "http.response.body":
            self._rest += message.get("body", b"")
            is_last = not message.get("more_body", False)
            if self._media_type == "text/event-stream":
                self._take_events()
                if is_last and self._rest:
                    self._complain(f"the stream ends within an event: {self._rest!r}")
            elif is_last and self._status != CLIENT_GONE:
                self._take_whole()

    def _take_head(self, message: "Message") -> None:
        headers = {key.decode().lower(): value.decode() for key, value in message["headers"]}
        self._status = message["status"]
        self._media_type = headers.get("content-type", "").partition(";")[0]
        if self._status != CLIENT_GONE:
            for name in ON_EVERY_RESPONSE:
                if name not in headers:
                    self._complain(f"no {name} in a {self._status}")

    def _take_events(self) -> None:
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if data := data_of(event):
                self._judge(data, chunk_complaints, self._method, self._path)

    def _take_whole(self) -> None:
        if self._media_type == "application/json":
            is_late_error = self._rest.startswith(b" ") and self._rest.lstrip().startswith(_ERRORS)
            status = 500 if is_late_error else self._status  # after spaces, the status was sent
            self._judge(self._rest, whole_complaints, self._method, self._path, status)
        elif self._status >= 400:
            self._complain(f"a {self._status} that is not JSON but {self._media_type!r}")

    def _judge(self, data: bytes, find: Callable[..., list[str]], *about: object) -> None:
        try:
            self.complaints += find(*about, parsed(data))
        except orjson.JSONDecodeError:
            self._complain(f"no JSON: {data[:200]!r}")

    def _complain(self, what: str) -> None:
        self.complaints.append(f"{self._method} {self._path}: {what}")


def data_of(event: bytes) -> bytes:
    """The data of a server-sent event; a comment has none."""
    lines = event.split(b"\n")
    return b"\n".join(line[6:] for line in lines if line.startswith(b"data: "))


class CheckedApp:
    """An app whose responses are checked; `complaints` has all that was wrong with them."""

    def __init__(self, app: "ASGIApp") -> None:
        self.complaints: list[str] = []
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        check = ResponseCheck(scope["method"], scope["path"])

        async def send_checked(message: "Message") -> None:
            check.take(message)
            self.complaints += check.complaints
            check.complaints = []
            await send(message)

        await self._app(scope, receive, send_checked)


def parsed(data: bytes) -> Any:
    """The data of an event; `[DONE]` as the word DONE."""
    return "DONE" if data == b"[DONE]" else orjson.loads(data)
