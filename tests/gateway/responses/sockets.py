"""A WebSocket of the Responses API without a network."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from tests.gateway.responses.asking import PATH
from tests.gateway.rig import MODEL, Rig
from tests.gateway.scripted_model import END, ByteTokenizer, PlainTemplate

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


class FakeSocket:
    """The client's end and the server's end of a WebSocket, in memory."""

    def __init__(self) -> None:
        self.num_pings = self.num_rests = 0
        self.status = 0  # of the answer to the handshake, if it was rejected
        self.error: Any = None
        self._to_server: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._to_client: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> bytes | None:
        return await self._to_server.get()

    async def send(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            self._to_client.put_nowait(orjson.loads(message))

    def rest(self) -> None:
        self.num_rests += 1

    def ping(self) -> None:
        self.num_pings += 1

    def close(self, code: int, reason: str = "") -> None:
        self._to_server.put_nowait(None)

    def write(self, kind: str = "response.create", **fields: Any) -> None:
        """Send a message to the server."""
        model = {"model": MODEL} if kind == "response.create" else {}
        self._to_server.put_nowait(orjson.dumps({"type": kind, **model, **fields}))

    def write_text(self, text: bytes) -> None:
        self._to_server.put_nowait(text)

    @property
    def num_events(self) -> int:
        """Events that the client has not read."""
        return self._to_client.qsize()

    async def event(self) -> Any:
        """The next event."""
        return await self._to_client.get()

    async def until(self, *kinds: str) -> Any:
        """The next event of one of these types; those before it are dropped."""
        while (event := await self.event())["type"] not in kinds:
            pass
        return event

    async def response(self, **fields: Any) -> Any:
        """The response to a message."""
        self.write(**fields)
        event = await self.until("response.completed", "response.incomplete", "error")
        assert event["type"] != "error", event
        return event["response"]

    async def answer_to_handshake(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.error = orjson.loads(message["body"])["error"]


@asynccontextmanager
async def connected(
    rig: Rig, headers: Mapping[str, str] | None = None
) -> AsyncIterator[FakeSocket]:
    """A connection, which the client closes at the end of the block."""
    client = FakeSocket()
    given = {"host": "localhost", **(headers or {})}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "scheme": "http",
        "root_path": "", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 5), "state": {},
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "podway.upgrade": lambda max_bytes: client,
    }  # fmt: skip

    async def disconnected() -> Any:
        await asyncio.Event().wait()

    async def serve() -> None:
        await rig.app(scope, disconnected, client.answer_to_handshake)

    serving = asyncio.create_task(serve())
    try:
        yield client
    finally:
        client.close(1000)
        await serving


class EndsMessages(PlainTemplate):
    """Each message ends with the model's end token."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        lines = [f"{message['role']}:{message['content']}<end>\n" for message in messages]
        return "".join((*lines, "assistant:"))


class CountsCharacters(ByteTokenizer):
    """Reads the end token in texts, and counts the characters that it tokenizes."""

    def __init__(self) -> None:
        self.num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.num_chars += len(text)
        pieces = [[*piece.encode(), END] for piece in text.split("<end>")]
        return [token for piece in pieces for token in piece][:-1]


def text_of(response: Any) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


def prompts(rig: Rig) -> list[str]:
    return [bytes(request.spec.prompt).decode() for request in rig.ended]
