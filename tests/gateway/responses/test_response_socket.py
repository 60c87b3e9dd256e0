"""`GET /v1/responses`: responses over a WebSocket, continued in the connection and steered."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import orjson
import pytest

from adapters.dialects.choosing import choose_dialect
from gateway.access.key_file import Allowance
from gateway.generation.held import MAX_HELD, HeldConversations, HeldResponses, held_response
from tests.gateway.rig import MODEL, STEP, Rig, Setting, play
from tests.gateway.scripted_model import END, ByteTokenizer, PlainTemplate

PATH = "/v1/responses"
HERMES = choose_dialect("", "hermes", "think")
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


def test_a_message_gets_the_events_of_a_streamed_response() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write(input="hi")
            events = [await client.event()]
            while events[-1]["type"] != "response.completed":
                events.append(await client.event())
        async with rig.client.post(PATH, {"model": MODEL, "input": "hi", "stream": True}) as http:
            streamed = [event async for event in http.events()]
        kinds = [event["type"] for event in events]
        assert kinds == [event["type"] for event in streamed]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert text_of(events[-1]["response"]) == "Hello!"

    play(scene)


def test_a_response_that_is_not_stored_can_be_continued_in_its_connection_only() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client, connected(rig) as other:
            first = await client.response(input="hi", store=False)
            fields = {"input": "more", "previous_response_id": first["id"], "store": False}
            second = await client.response(**fields)
            assert second["previous_response_id"] == first["id"]
            other.write(**fields)
            error = await other.event()
            assert (error["type"], error["status"]) == ("error", 400)
            assert error["error"]["code"] == "previous_response_not_found"
            assert error["error"]["param"] == "previous_response_id"
        assert prompts(rig) == ["user:hi\n", "user:hi\nassistant:Hello!\nuser:more\n"]

    play(scene)


def test_a_turn_tokenizes_what_is_new_and_gets_the_ids_of_the_whole_prompt() -> None:
    turns: list[tuple[int, tuple[int, ...]]] = []
    tokenizer = CountsCharacters()

    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            fields: dict[str, Any] = {"store": False}
            for text in ("first" * 20, "second", "third"):
                tokenizer.num_chars = 0
                response = await client.response(input=text, **fields)
                fields["previous_response_id"] = response["id"]
                turns.append((tokenizer.num_chars, rig.ended[-1].spec.prompt))

    with patch("tests.gateway.rig.PlainTemplate", EndsMessages):
        play(scene, Setting(context=1000, tokenizer=tokenizer))
    new = "<end>\nuser:third<end>\nassistant:"
    (_, _), (_, second), (num_chars, third) = turns
    assert num_chars == len(new)
    whole = [*second, *b"Hello!", END, *b"\nuser:third", END, *b"\nassistant:"]
    assert list(third) == whole


def test_a_stored_response_can_be_continued_over_http() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            first = await client.response(input="hi")
        body = {"model": MODEL, "input": "more", "previous_response_id": first["id"]}
        async with rig.client.post(PATH, body) as exchange:
            assert await exchange.start() == 200
            await exchange.read()
        assert prompts(rig)[-1] == "user:hi\nassistant:Hello!\nuser:more\n"

    play(scene)


def test_a_prompt_of_nothing_can_be_continued() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            warm = await client.response(generate=False, store=False)
            assert warm["output"] == []
            await client.response(input="hi", previous_response_id=warm["id"], store=False)
        assert prompts(rig) == ["user:\n", "user:hi\n"]

    play(scene)


@pytest.mark.parametrize("items", [[], "hi"])
def test_without_generate_a_prompt_is_computed_and_can_be_continued(items: Any) -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            fields = {"instructions": "Be brief.", "store": False}
            warm = await client.response(input=items, generate=False, **fields)
            assert (warm["status"], warm["output"]) == ("completed", [])
            assert warm["usage"]["output_tokens"] == 0
            result = await client.response(input="and", previous_response_id=warm["id"], **fields)
            assert text_of(result) == "Hello!"
        shared = "system:Be brief.\nuser:"
        rest = "hi\nuser:and\n" if items else "and\n"
        assert prompts(rig) == [f"{shared}{items or ''}\n", shared + rest]
        assert rig.ended[1].num_cached >= len(shared)

    play(scene)


def test_steering_ends_the_answer_at_a_token_and_goes_on_from_it() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write(input="hi", store=False, metadata={"a": "b"})
            created = await client.until("response.created")
            await client.until("response.output_text.delta")
            running = created["response"]["id"]
            client.write("response.steer", input="stop", previous_response_id=running)
            accepted = await client.until("response.steer.accepted")
            assert accepted["steer"]["previous_response_id"] == running
            ended = (await client.until("response.incomplete"))["response"]
            assert ended["incomplete_details"] == {"reason": "steered"}
            said = text_of(ended)
            assert said in ("H", "He", "Hel", "Hell")
            successor = (await client.until("response.created"))["response"]
            assert successor["previous_response_id"] == running
            assert successor["metadata"] == {"a": "b"}
            await client.until("response.completed")
        assert prompts(rig)[1] == f"user:hi\nassistant:{said}\nuser:stop\n"
        assert rig.ended[1].num_cached >= len("user:hi\n")  # its KV stayed

    play(scene)


def test_steering_before_the_first_token_begins_the_next_response_at_once() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write(input="hi", store=False)
            await asyncio.sleep(STEP / 2)
            (running,) = rig.service.running._by_id
            items = [{"role": "user", "content": [{"type": "input_text", "text": "now"}]}]
            client.write("response.steer", input=items, previous_response_id=running)
            ended = (await client.until("response.incomplete"))["response"]
            assert ended["output"] == []
            last = await client.until("response.completed")
            assert last["response"]["previous_response_id"] == running
        assert prompts(rig) == ["user:hi\n", "user:hi\nuser:now\n"]

    play(scene)


def test_steering_a_call_waits_for_its_output_and_comes_before_it() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write(input="hi", store=False, tools=[TOOL])
            running = (await client.until("response.created"))["response"]["id"]
            added = await client.until("response.output_item.added")
            assert added["item"]["type"] == "function_call"
            client.write("response.steer", input="wait", previous_response_id=running)
            done = (await client.until("response.completed"))["response"]
            pending = await client.event()
            assert pending["type"] == "response.steer.pending"
            (stub,) = pending["required_input"]
            call = done["output"][-1]
            assert stub == {
                "type": "function_call_output", "call_id": call["call_id"], "name": "add",
            }  # fmt: skip
            output = {**stub, "output": "3"}
            del output["name"]
            await client.response(
                input=[output], previous_response_id=running, store=False, tools=[TOOL]
            )
        assert prompts(rig)[1].endswith("user:wait\ntool:3\n")

    play(scene, Setting(texts=(CALL, "Three."), dialect=HERMES, context=400))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"previous_response_id": "resp_none", "input": "x"}, "response_not_found"),
        ({"previous_response_id": "resp_none", "input": []}, "invalid_input"),
        ({"previous_response_id": "resp_none"}, "invalid_input"),
        (
            {"previous_response_id": "r", "input": [{"role": "system", "content": "x"}]},
            "invalid_input",
        ),
        ({"previous_response_id": "r", "input": "x", "stream_id": "a"}, "invalid_input"),
    ],
)
def test_steering_that_is_not_accepted_gets_its_input_back(fields: Any, code: str) -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write("response.steer", **fields)
            event = await client.event()
            assert (event["type"], event["error"]["code"]) == ("response.steer.failed", code)
            assert event["steer"].get("input") == fields.get("input")

    play(scene)


def test_a_completed_response_is_not_steered() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            first = await client.response(input="hi", store=False)
            client.write("response.steer", input="x", previous_response_id=first["id"])
            event = await client.event()
            assert event["error"]["code"] == "response_already_completed"

    play(scene)


def test_streams_run_beside_each_other_and_name_themselves() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            for stream_id in ("a", "b", "a"):
                client.write(input="hi", stream_id=stream_id, store=False)
            order = [
                (await client.until("response.created", "response.completed")) for _ in range(6)
            ]
            seen = [
                (event["type"].removeprefix("response."), event["stream_id"]) for event in order
            ]
            assert seen[:2] == [("created", "a"), ("created", "b")]
            assert seen.index(("completed", "a")) < len(seen) - seen[::-1].index(("created", "a"))
            assert seen.count(("completed", "a")) == 2

    play(scene)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"type":"session.update"}', "type"),
        (b'{"type":"response.create","stream_id":""}', "stream_id"),
        (
            b'{"type":"response.create","model":"org/tiny-bytes","input":"x","stream":false}',
            "stream",
        ),
        (
            b'{"type":"response.create","model":"org/tiny-bytes","input":"x","background":true}',
            "background",
        ),
        (b'{"type":"response.create","model":"org/tiny-bytes"}', "input"),
    ],
)
def test_a_wrong_message_gets_an_error_and_the_connection_stays(text: bytes, param: str) -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write_text(text)
            event = await client.event()
            assert (event["type"], event["status"]) == ("error", 400)
            assert event["error"]["param"] == param
            assert text_of(await client.response(input="hi")) == "Hello!"

    play(scene)


def test_responses_end_when_their_connection_does() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write(input="hi")
            await client.until("response.output_text.delta")
        await asyncio.sleep(2 * STEP)
        (request,) = rig.ended
        assert request.produced < len("Hello!")
        assert not rig.service.engine.scheduler.pool

    play(scene)


def test_each_message_counts_against_the_limits_of_its_key() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig, {"authorization": "Bearer k"}) as client:
            assert text_of(await client.response(input="hi")) == "Hello!"
            client.write(input="hi")
            event = await client.event()
            assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")

    play(scene, Setting(keys=("k",), allowance=Allowance(requests_per_minute=1)))


@pytest.mark.parametrize(
    ("headers", "setting", "status"),
    [
        ({}, Setting(keys=("k",)), 401),
        ({"origin": "http://evil.example"}, Setting(), 403),
        ({"host": "evil.example"}, Setting(), 403),
    ],
)
def test_the_handshake_is_checked_as_a_request_is(
    headers: dict[str, str], setting: Setting, status: int
) -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig, headers) as client:
            await asyncio.sleep(STEP)
            assert client.status == status

    play(scene, setting)


def test_a_request_that_asks_for_no_upgrade_is_told_to() -> None:
    async def scene(rig: Rig) -> None:
        async with rig.client.get(PATH) as exchange:
            assert await exchange.start() == 426
            assert exchange.headers["upgrade"] == "websocket"
            assert "POST" in (await exchange.json())["error"]["message"]

    play(scene)


def test_a_new_response_is_rejected_while_the_server_drains() -> None:
    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            await client.response(input="hi")
            await rig.engine.drain(0)
            client.write(input="hi")
            event = await client.event()
            assert (event["status"], event["error"]["code"]) == (503, "unavailable")

    play(scene)


def test_what_connections_hold_is_bounded_in_number_and_bytes() -> None:
    held = HeldResponses(max_bytes=20_000)
    first, second = HeldConversations(held, "a"), HeldConversations(held, "b")
    for number in range(MAX_HELD + 1):
        first.put(str(number), held_response([{}], None))
    assert first.find("0") is None
    assert first.find("1") is not None
    second.put("x", held_response([{"image": "x" * 15_000}], None))
    assert held.num_bytes <= 20_000
    assert second.find("x") is None  # of the key that holds the most
    assert first.find(str(MAX_HELD)) is not None
    first.close()
    assert held.num_bytes == 0
