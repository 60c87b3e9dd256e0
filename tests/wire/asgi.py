"""An in-process ASGI client that sends a request and receives the response piece by piece.

Unlike httpx's transport it yields chunks as they arrive, can disconnect at any moment, and can
stop reading: then the app's `send` waits, as behind a full socket. Every response is checked
against OpenAI's own schema (`tests.wire.response_check`).
"""

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import orjson

from tests.wire.response_check import ResponseCheck, data_of, parsed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """As `Exchange.events` yields them."""
        *frames, rest = self.content.split(b"\n\n")
        assert rest == b"", "the stream ends with a whole event"
        return [parsed(data) for frame in frames if (data := data_of(frame))]


class Exchange:
    """One request and its response. `await` takes it whole; leaving `async with` disconnects."""

    def __init__(self, app: "ASGIApp", scope: dict[str, Any], body: list[bytes]) -> None:
        self.status: int = 0  # from `start` on
        self.headers: dict[str, str] = {}
        self._app = app
        self._scope = scope | {"podway.chunks": self}
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        for i, piece in enumerate(body):
            more = i + 1 < len(body)
            self._requests.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._reads = asyncio.Event()
        self._reads.set()
        self._check = ResponseCheck(scope["method"], scope["path"])
        self._task: asyncio.Task[None]

    def hold_back(self, num_pieces: int) -> None:
        """Never send the last pieces of the body. To be called before the exchange begins."""
        pieces = [self._requests.get_nowait() for _ in range(self._requests.qsize())]
        for piece in pieces[:-num_pieces]:
            self._requests.put_nowait(piece)

    def __await__(self) -> Generator[Any, None, Reply]:
        return self._whole().__await__()

    async def _whole(self) -> Reply:
        async with self:
            content = await self.read()
        return Reply(self.status, self.headers, content)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.disconnect()
        self.resume()
        await asyncio.wait((self._task,))
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error
        assert self._check.complaints == [], self._check.complaints

    def disconnect(self) -> None:
        """Disconnect now."""
        self._requests.put_nowait({"type": "http.disconnect"})

    def pause(self) -> None:
        """Stop reading: the app's next `send` waits for `resume`."""
        self._reads.clear()

    def resume(self) -> None:
        """Continue reading."""
        self._reads.set()

    @property
    def is_over(self) -> bool:
        """Whether the app has returned."""
        return self._task.done()

    async def ended(self) -> None:
        """Wait until the app has returned."""
        await asyncio.wait((self._task,))

    async def start(self) -> int:
        """Wait for the status line."""
        message = await self._next()
        assert message["type"] == "http.response.start", message
        self.status = message["status"]
        self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """The pieces of the body as the app writes them."""
        if not self.status:
            await self.start()
        more = True
        while more:
            message = await self._next()
            more = message.get("more_body", False)
            if message["body"]:
                yield message["body"]

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def json(self) -> Any:
        """The whole body, parsed."""
        return orjson.loads(await self.read())

    async def events(self) -> AsyncIterator[Any]:
        """The data of each server-sent event, parsed; `[DONE]` as the string DONE."""
        rest = b""
        async for chunk in self.chunks():
            rest += chunk
            *frames, rest = rest.split(b"\n\n")
            for frame in frames:
                if data := data_of(frame):
                    yield parsed(data)
        assert rest == b"", "the stream ends with a whole event"

    async def _next(self) -> "Message":
        getting = asyncio.ensure_future(self._messages.get())
        await asyncio.wait((getting, self._task), return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        getting.cancel()
        if not self._messages.empty():
            return self._messages.get_nowait()
        self._task.result()
        raise EOFError("the app returned without finishing its response")

    async def _run(self) -> None:
        await self._app(self._scope, self._requests.get, self._send)

    def only_sends(self) -> None:
        """Offer no way to write without waiting. To be called before the exchange begins."""
        del self._scope["podway.chunks"]

    @property
    def is_open(self) -> bool:
        return self._reads.is_set()

    def write(self, body: bytes) -> None:
        self._take({"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, message: "Message") -> None:
        await self._reads.wait()
        self._take(message)

    def _take(self, message: "Message") -> None:
        self._check.take(message)
        self._messages.put_nowait(message)


class Client:
    """Makes exchanges with one app."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Exchange:
        return self.send("GET", path, headers=headers)

    def post(
        self, path: str, payload: object, headers: Mapping[str, str] | None = None
    ) -> Exchange:
        """A JSON body; bytes are sent as they are."""
        headers = {"content-type": "application/json", **(headers or {})}
        body = payload if isinstance(payload, bytes) else orjson.dumps(payload)
        return self.send("POST", path, [body], headers)

    def send(
        self,
        method: str,
        path: str,
        body: list[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        client: str = "127.0.0.1",
    ) -> Exchange:
        """Any request, its body in pieces; `client` is its address."""
        path, _, query = path.partition("?")
        named = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": named,
            "client": (client, 1),
            "server": ("test", 80),
        }
        return Exchange(self._app, scope, body or [b""])
