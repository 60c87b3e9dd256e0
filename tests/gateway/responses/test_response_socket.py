import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from gateway.access.key_file import Allowance
from gateway.generation.held import MAX_HELD, HeldConversations, HeldResponses, held_response
from gateway.generation.threads import read_body_with
from gateway.schema.responses.socket import Message
from tests.gateway.responses.asking import PATH
from tests.gateway.responses.sockets import (
    CountsCharacters,
    EndsMessages,
    connected,
    prompts,
    text_of,
)
from tests.gateway.rig import MODEL, STEP, Rig, Setting, play, played
from tests.gateway.scripted_model import END


@played()
async def test_a_message_gets_the_events_of_a_streamed_response(rig: Rig) -> None:
    async with connected(rig) as client:
        client.write(input="hi")
        events = [await client.event()]
        while events[-1]["type"] != "response.completed":
            events.append(await client.event())
    streamed = (await rig.client.post(PATH, {"model": MODEL, "input": "hi", "stream": True})).events
    kinds = [event["type"] for event in events]
    assert kinds == [event["type"] for event in streamed]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert text_of(events[-1]["response"]) == "Hello!"


def test_a_connection_does_not_rest_while_its_next_message_is_read() -> None:
    async def slowly(read: Callable[[], Message], text: bytes) -> Message:
        await asyncio.sleep(20 * STEP)  # longer than a response takes
        return await read_body_with(read, text)

    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            client.write(input="hi")
            client.write(input="hi")
            await client.until("response.completed")
            await asyncio.sleep(STEP)
            assert client.num_rests == 0
            await client.until("response.completed")

    with patch("gateway.web.routes.response_socket.read_body_with", slowly):
        play(scene)


@played()
async def test_a_response_that_is_not_stored_can_be_continued_in_its_connection_only(
    rig: Rig,
) -> None:
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


@played()
async def test_a_message_that_fails_ends_what_it_would_have_continued(rig: Rig) -> None:
    async with connected(rig) as client:
        first = await client.response(input="hi", store=False)
        other = await client.response(input="hi", store=False)
        fields = {"previous_response_id": first["id"], "store": False}
        orphan = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "2"}
        client.write(input=[orphan], **fields)
        error = (await client.event())["error"]
        assert error["message"].startswith("No tool call found"), error
        client.write(input="more", **fields)
        error = (await client.event())["error"]
        assert error["code"] == "previous_response_not_found"
        fields["previous_response_id"] = other["id"]
        assert text_of(await client.response(input="more", **fields)) == "Hello!"


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


@played()
async def test_a_stored_response_can_be_continued_over_http(rig: Rig) -> None:
    async with connected(rig) as client:
        first = await client.response(input="hi")
    body = {"model": MODEL, "input": "more", "previous_response_id": first["id"]}
    assert (await rig.client.post(PATH, body)).status == 200
    assert prompts(rig)[-1] == "user:hi\nassistant:Hello!\nuser:more\n"


@played()
async def test_a_prompt_of_nothing_can_be_continued(rig: Rig) -> None:
    async with connected(rig) as client:
        warm = await client.response(generate=False, store=False)
        assert warm["output"] == []
        await client.response(input="hi", previous_response_id=warm["id"], store=False)
    assert prompts(rig) == ["user:\n", "user:hi\n"]


@pytest.mark.parametrize("items", [[], "hi"])
@played()
async def test_without_generate_a_prompt_is_computed_and_can_be_continued(
    rig: Rig, items: Any
) -> None:
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
    assert (rig.ended[0].spec.max_tokens, rig.ended[0].output) == (0, [])
    assert not rig.ended[0].spec.is_background


@played()
async def test_streams_run_beside_each_other_and_name_themselves(rig: Rig) -> None:
    async with connected(rig) as client:
        for stream_id in ("a", "b", "a"):
            client.write(input="hi", stream_id=stream_id, store=False)
        order = [(await client.until("response.created", "response.completed")) for _ in range(6)]
        seen = [(event["type"].removeprefix("response."), event["stream_id"]) for event in order]
        assert seen[:2] == [("created", "a"), ("created", "b")]
        assert seen.index(("completed", "a")) < len(seen) - seen[::-1].index(("created", "a"))
        assert seen.count(("completed", "a")) == 2


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
@played()
async def test_a_wrong_message_gets_an_error_and_the_connection_stays(
    rig: Rig, text: bytes, param: str
) -> None:
    async with connected(rig) as client:
        client.write_text(text)
        event = await client.event()
        assert (event["type"], event["status"]) == ("error", 400)
        assert event["error"]["param"] == param
        assert text_of(await client.response(input="hi")) == "Hello!"


@played()
async def test_others_run_between_the_messages_of_a_connection(rig: Rig) -> None:
    async with connected(rig) as client:
        for _ in range(100):
            client.write_text(b"{")
        await client.event()
        await asyncio.sleep(0)
        assert client.num_events <= 3


@played()
async def test_responses_end_when_their_connection_does(rig: Rig) -> None:
    async with connected(rig) as client:
        client.write(input="hi")
        await client.until("response.output_text.delta")
    await asyncio.sleep(2 * STEP)
    (request,) = rig.ended
    assert request.produced < len("Hello!")
    assert not rig.service.engine.scheduler.pool


@played(Setting(keys=("k",), allowance=Allowance(requests_per_minute=1)))
async def test_each_message_counts_against_the_limits_of_its_key(rig: Rig) -> None:
    async with connected(rig, {"authorization": "Bearer k"}) as client:
        assert text_of(await client.response(input="hi")) == "Hello!"
        client.write(input="hi")
        event = await client.event()
        assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")


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


@played()
async def test_a_request_that_asks_for_no_upgrade_is_told_to(rig: Rig) -> None:
    exchange = await rig.client.get(PATH)
    assert exchange.status == 426
    assert exchange.headers["upgrade"] == "websocket"
    assert "POST" in exchange.json["error"]["message"]


@played()
async def test_a_new_response_is_rejected_while_the_server_drains(rig: Rig) -> None:
    async with connected(rig) as client:
        await client.response(input="hi")
        await rig.engine.drain(0)
        client.write(input="hi")
        event = await client.event()
        assert (event["status"], event["error"]["code"]) == (503, "unavailable")


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


def test_a_late_turn_renders_few_messages_and_gets_the_prompt_of_all() -> None:
    sizes: list[int] = []

    class Counts(EndsMessages):
        def render(self, messages: Any, /, **kwargs: Any) -> str:
            sizes.append(len(messages))
            return super().render(messages, **kwargs)

    async def scene(rig: Rig) -> None:
        async with connected(rig) as client:
            fields: dict[str, Any] = {"store": False, "instructions": "Be brief."}
            for number in range(20):
                sizes.clear()
                response = await client.response(input=f"question {number}", **fields)
                fields["previous_response_id"] = response["id"]
            late, whole = list(sizes), list(rig.ended[-1].spec.prompt)
            sizes.clear()
            await client.response(input="other", **{**fields, "instructions": "Be long."})
        assert len(late) == 2
        assert max(late) < 20
        assert sizes == [42]  # another beginning
        turns = [f"user:question {n}<end>\nassistant:Hello!<end>\n" for n in range(20)]
        text = "".join(["system:Be brief.<end>\n", *turns]).removesuffix("Hello!<end>\n")
        assert whole == CountsCharacters().encode(text, add_special_tokens=False)

    setting = Setting(
        texts=("Hello!",) * 21, context=2000, tokenizer=CountsCharacters(), num_blocks=4000
    )
    with patch("tests.gateway.rig.PlainTemplate", Counts):
        play(scene, setting)
