import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types.conversations import Conversation
from openai.types.responses import Response

from gateway.store import conversations as stored
from gateway.store.responses import ResponseLimits
from tests.gateway.rig import MODEL, STEP, Rig, Setting, play, played
from tests.gateway.scenes import plays

Scene = Callable[[openai.AsyncOpenAI], Awaitable[None]]
PATH = "/v1/conversations"


def client_of(rig: Rig, key: str = "any") -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(rig.app)
    http = httpx2.AsyncClient(transport=transport, base_url="http://podway")
    return openai.AsyncOpenAI(
        api_key=key, base_url="http://127.0.0.1/v1", http_client=http, max_retries=0
    )


def with_client(scene: Scene, setting: Setting | None = None) -> Rig:
    async def main(rig: Rig) -> None:
        async with client_of(rig) as client:
            await scene(client)

    return play(main, setting)


def user(text: str, **more: Any) -> Any:
    return {"type": "message", "role": "user", "content": text, **more}


async def texts(client: openai.AsyncOpenAI, conversation_id: str) -> list[str]:
    """The texts of all messages, oldest first."""
    items: Any = client.conversations.items.list(conversation_id, order="asc", limit=2)
    return [item.content[0].text async for item in items]


async def answered(client: openai.AsyncOpenAI, conversation: Any, text: str, **more: Any) -> Any:
    return await client.responses.create(
        model=MODEL, input=text, conversation=conversation, max_output_tokens=9, **more
    )


@plays(with_client)
async def test_a_conversation_is_created_read_changed_and_deleted(
    client: openai.AsyncOpenAI,
) -> None:
    made = await client.conversations.create(metadata={"a": "b"}, items=[user("one")])
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    assert made.id.startswith("conv_")
    assert await client.conversations.retrieve(made.id) == made
    changed = await client.conversations.update(made.id, metadata={"c": "d"})
    assert changed == made.model_copy(update={"metadata": {"c": "d"}})
    assert await texts(client, made.id) == ["one"]
    gone = await client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError, match="not found") as failed:
        await client.conversations.retrieve(made.id)
    assert failed.value.code == "conversation_not_found"


@plays(with_client)
async def test_items_are_added_listed_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create()
    items = client.conversations.items
    added = await items.create(made.id, items=[user(f"{i}", id=f"msg_{i}") for i in range(5)])
    assert [item.id for item in added.data] == [f"msg_{i}" for i in range(5)]
    newest = await items.list(made.id, limit=2)
    assert ([item.id for item in newest.data], newest.has_more) == (["msg_4", "msg_3"], True)
    after = await items.list(made.id, order="asc", after="msg_3")
    assert [item.id for item in after.data] == ["msg_4"]
    assert await items.retrieve("msg_2", conversation_id=made.id) == added.data[2]
    assert await items.delete("msg_2", conversation_id=made.id) == made
    assert await texts(client, made.id) == ["0", "1", "3", "4"]
    for call in (items.retrieve, items.delete):
        with pytest.raises(openai.NotFoundError, match="no item 'msg_2'"):
            await call("msg_2", conversation_id=made.id)
    again = await items.create(made.id, items=[user("again", id="msg_0")])
    assert again.data[0].id != "msg_0"


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@plays(partial(with_client, setting=Setting(texts=("one", "two"))))
async def test_a_response_continues_its_conversation_and_is_added_to_it(
    client: openai.AsyncOpenAI, as_object: bool, stream: bool
) -> None:
    made = await client.conversations.create(items=[user("before")])
    conversation: Any = {"id": made.id} if as_object else made.id
    if stream:
        events = await answered(client, conversation, "first", stream=True, store=False)
        (first,) = [e.response async for e in events if e.type == "response.completed"]
    else:
        first = await answered(client, conversation, "first", store=False)
    assert first.conversation is not None
    assert first.conversation.id == made.id
    second: Response = await answered(client, conversation, "second")
    assert await texts(client, made.id) == ["before", "first", "one", "second", "two"]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    seen = await client.responses.input_items.list(second.id, order="asc")
    assert len(seen.data) == 4  # all that the model has read
    counted = await client.responses.input_tokens.count(
        model=MODEL, input="third", conversation=conversation
    )
    assert counted.input_tokens > second.usage.input_tokens


@plays(partial(with_client, setting=Setting(texts=("abcdefg", "a", "b"))))
async def test_of_two_responses_at_once_one_is_refused_and_the_next_is_not(
    client: openai.AsyncOpenAI,
) -> None:
    made = await client.conversations.create()
    first = asyncio.create_task(answered(client, made.id, "first"))
    await asyncio.sleep(2 * STEP)
    with pytest.raises(openai.ConflictError) as failed:
        await answered(client, made.id, "second")
    assert failed.value.code == "conversation_locked"
    await answered(client, (await client.conversations.create()).id, "another one")
    await first
    await answered(client, made.id, "third")
    asked = (await texts(client, made.id))[::2]
    assert asked == ["first", "third"]


@plays(with_client)
async def test_what_fails_is_not_added(client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create()
    bodies: list[dict[str, Any]] = [
        {"input": "a" * 5000},
        {"previous_response_id": "resp_1"},
        {"tools": [{}]},
    ]
    for body in bodies:
        fields: Any = {"model": MODEL, "input": "x", "conversation": made.id, **body}
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**fields)
    with pytest.raises(openai.NotFoundError):
        await answered(client, "conv_none", "x")
    assert await texts(client, made.id) == []


@plays(partial(with_client, setting=Setting(texts=("abcdefg",))))
async def test_a_conversation_may_be_deleted_while_a_response_is_generated(
    client: openai.AsyncOpenAI,
) -> None:
    made = await client.conversations.create()
    answer = asyncio.create_task(answered(client, made.id, "first"))
    await asyncio.sleep(2 * STEP)
    await client.conversations.delete(made.id)
    assert (await answer).output_text == "abcdefg"


@played(Setting(keys=("a", "b")))
async def test_another_key_has_no_such_conversation(rig: Rig) -> None:
    async with client_of(rig, "a") as mine, client_of(rig, "b") as others:
        made = await mine.conversations.create(items=[user("x")])
        items = others.conversations.items
        for call in (
            others.conversations.retrieve(made.id),
            others.conversations.delete(made.id),
            items.create(made.id, items=[user("y")]),
            answered(others, made.id, "y"),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert await texts(mine, made.id) == ["x"]


@plays(partial(with_client, setting=Setting(responses=ResponseLimits(count=2))))
async def test_the_least_recently_changed_conversations_are_deleted_first(
    client: openai.AsyncOpenAI,
) -> None:
    made = [await client.conversations.create() for _ in range(2)]
    await client.conversations.update(made[0].id, metadata={})
    made.append(await client.conversations.create())
    assert await client.conversations.retrieve(made[0].id) == made[0]
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(made[1].id)


def test_a_full_conversation_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_ITEMS", 2)

    async def scene(client: openai.AsyncOpenAI) -> None:
        made = await client.conversations.create(items=[user("x"), user("y")])
        with pytest.raises(openai.BadRequestError, match="at most 2 items"):
            await client.conversations.items.create(made.id, items=[user("z")])
        await answered(client, made.id, "z")  # what a response adds is never lost
        with pytest.raises(openai.BadRequestError, match="at most 2 items"):
            await answered(client, made.id, "more")

    with_client(scene)


def test_conversations_are_there_after_a_restart(tmp_path: Path) -> None:
    setting, made = Setting(store=tmp_path / "store.sqlite"), list[Conversation]()

    async def before(client: openai.AsyncOpenAI) -> None:
        made.append(await client.conversations.create(items=[user("x")]))
        await answered(client, made[0].id, "y")

    async def after(client: openai.AsyncOpenAI) -> None:
        assert await client.conversations.retrieve(made[0].id) == made[0]
        assert await texts(client, made[0].id) == ["x", "y", "Hello!"]

    with_client(before, setting)
    with_client(after, setting)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"metadata": {"a": 1}}, "metadata"),
        ("", {"items": [{"type": "image_generation_call"}]}, "items[0]"),
        ("", {"surprise": 1}, "surprise"),
        ("/{}", {}, "metadata"),
        ("/{}/items", {"items": []}, "items"),
        ("", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("/{}/items", {"items": [{"role": "user"}]}, "items[0].content"),
    ],
)
@played()
async def test_invalid_bodies_name_the_field(rig: Rig, path: str, body: Any, param: str) -> None:
    made = (await rig.client.post(PATH, {})).json
    exchange = await rig.client.post(PATH + path.format(made["id"]), body)
    assert exchange.status == 400
    assert exchange.json["error"]["param"].startswith(param)


@played()
async def test_a_response_of_a_conversation_has_openais_shape(rig: Rig) -> None:
    made = (await rig.client.post(PATH, {})).json
    body = {"model": MODEL, "input": "x", "conversation": made["id"]}
    assert (await rig.client.post("/v1/responses", body)).json["conversation"] == {"id": made["id"]}
