"""What we answer, held to OpenAI's own description."""

from typing import Any

import pytest

from tests.gateway.rig import CHAT, TEXT, Rig, chat, play, text
from tests.gateway.spec import complaints

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def test_the_checker_finds_what_is_wrong() -> None:
    assert complaints("Model", {"id": 1, "object": "model", "created": 1, "owned_by": "x"})
    assert complaints("Model", {"id": "x", "object": "thing", "created": 1, "owned_by": "x"})
    assert complaints("Model", {"id": "x", "object": "model", "created": True, "owned_by": "x"})
    assert complaints("Model", {"id": "x", "object": "model", "owned_by": "x"})
    assert complaints("ErrorResponse", {"error": {"message": "x", "type": 1}})
    assert not complaints("Model", {"id": "x", "object": "model", "created": 1, "owned_by": "x"})


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        (CHAT, chat(n=2), "CreateChatCompletionResponse"),
        (TEXT, text(n=2), "CreateCompletionResponse"),
        (CHAT, chat(n=0), "ErrorResponse"),
        (CHAT, chat(model="x"), "ErrorResponse"),
    ],
)
def test_whole_replies_are_as_described(path: str, body: dict[str, Any], schema: str) -> None:
    async def scene(rig: Rig) -> None:
        async with rig.client.post(path, body) as exchange:
            assert complaints(schema, await exchange.json()) == []

    play(scene)


@pytest.mark.parametrize("fields", [{"stream": True}, USAGE, {**USAGE, "n": 3}])
def test_chat_chunks_are_as_described(fields: dict[str, Any]) -> None:
    async def scene(rig: Rig) -> None:
        async with rig.client.post(CHAT, chat(**fields)) as exchange:
            *chunks, _ = [event async for event in exchange.events()]
        assert [complaints("CreateChatCompletionStreamResponse", chunk) for chunk in chunks] == [
            [] for _ in chunks
        ]

    play(scene)


def test_a_failing_stream_ends_as_described() -> None:
    async def scene(rig: Rig) -> None:
        async with rig.client.post(CHAT, chat(stream=True)) as exchange:
            await exchange.start()
            await rig.engine.drain(0)
            *_, last = [event async for event in exchange.events()]
        assert complaints("ErrorResponse", last) == []

    play(scene)


def test_models_are_as_described_but_for_the_context() -> None:
    async def scene(rig: Rig) -> None:
        async with rig.client.get("/v1/models") as exchange:
            listed = await exchange.json()
        for model in listed["data"]:
            assert model.pop("max_model_len") == 200
        assert complaints("ListModelsResponse", listed) == []

    play(scene)
