import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.store import conversations as stored
from gateway.store.responses import DECODED_BYTES, ROWS, Item, Key, ResponseLimits
from tests.gateway.responses.test_conversations import (
    answered,
    client_of,
    texts,
    user,
    with_client,
)
from tests.gateway.rig import MODEL, Rig, Setting, play, played
from tests.gateway.scenes import plays


def messages(*names: str) -> list[Any]:
    return [user(name, id=f"msg_{name}") for name in names]


async def num_rows(rig: Rig, table: str) -> int:
    query = f"SELECT count(*) FROM {table}_item"
    return int(await rig.service.store.database.read(lambda db: db.execute(query).fetchone()[0]))


def test_what_is_done_to_one_item_reads_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_ITEMS", 4)

    def damage(db: sqlite3.Connection) -> None:
        """Nothing can decode the first two items any more."""
        db.execute("UPDATE conversation_item SET record = '{' WHERE id IN ('msg_a', 'msg_b')")

    async def scene(rig: Rig) -> None:
        async with client_of(rig) as client:
            items = client.conversations.items
            made = await client.conversations.create(items=messages("a", "b", "c"))
            await rig.service.store.database.write(damage)
            added = await items.create(made.id, items=messages("d"))
            assert await items.retrieve("msg_d", conversation_id=made.id) == added.data[0]
            page = await items.list(made.id, limit=2)
            assert ([item.id for item in page.data], page.has_more) == (["msg_d", "msg_c"], True)
            with pytest.raises(openai.BadRequestError, match="would have 5 items"):
                await items.create(made.id, items=messages("e"))
            assert await client.conversations.update(made.id, metadata={}) == made
            assert await items.delete("msg_d", conversation_id=made.id) == made
            assert await items.delete("msg_a", conversation_id=made.id) == made
            assert (await items.create(made.id, items=messages("e"))).data[0].id == "msg_e"
            assert await client.conversations.retrieve(made.id) == made

    play(scene)


def test_a_stored_response_and_a_page_of_its_items_are_read_without_the_others() -> None:
    def damage(db: sqlite3.Connection) -> None:
        db.execute("UPDATE response_item SET record = '{' WHERE id = 'msg_a'")

    async def scene(rig: Rig) -> None:
        async with client_of(rig) as client:
            made = await client.responses.create(model=MODEL, input=messages("a", "b", "c"))
            await rig.service.store.database.write(damage)
            assert (await client.responses.retrieve(made.id)).output_text == made.output_text
            page = await client.responses.input_items.list(made.id, order="asc", after="msg_a")
            assert [item.id for item in page.data] == ["msg_b", "msg_c"]

    play(scene)


@pytest.mark.parametrize(
    ("query", "shown", "has_more"),
    [
        ({"order": "asc"}, "acde", False),
        ({"order": "desc"}, "edca", False),
        ({"order": "asc", "limit": 4}, "acde", False),
        ({"order": "asc", "limit": 3}, "acd", True),
        ({"order": "asc", "limit": 2, "after": "msg_a"}, "cd", True),
        ({"order": "desc", "limit": 2, "after": "msg_d"}, "ca", False),
        ({"order": "desc", "after": "msg_a"}, "", False),
        ({"order": "asc", "after": "msg_e"}, "", False),
    ],
)
@plays(with_client)
async def test_pages_of_items_follow_the_order_in_which_they_were_added(
    client: openai.AsyncOpenAI, query: Any, shown: str, has_more: bool
) -> None:
    items = client.conversations.items
    made = await client.conversations.create(items=messages("a", "b", "c"))
    await client.conversations.create(items=messages("a", "x"))
    await items.create(made.id, items=messages("d"))
    await items.delete("msg_b", conversation_id=made.id)
    await items.create(made.id, items=messages("e"))
    page = await items.list(made.id, **query)
    assert [item.id for item in page.data] == [f"msg_{name}" for name in shown]
    assert page.has_more == has_more
    for gone in ("msg_b", "msg_x"):
        with pytest.raises(openai.BadRequestError, match=f"no item '{gone}'"):
            await items.list(made.id, after=gone)


@plays(with_client)
async def test_pages_of_input_items_continue_behind_the_first_of_equal_ids(
    client: openai.AsyncOpenAI,
) -> None:
    made = await client.responses.create(
        model=MODEL, input=[user("1", id="x"), user("2", id="y"), user("3", id="x")]
    )
    for order, shown in (("asc", ["2", "3"]), ("desc", ["2", "1"])):
        page: Any = await client.responses.input_items.list(
            made.id,
            after="x",
            order=order,  # type: ignore[arg-type] # it is one of the two
        )
        assert [item.content[0].text for item in page.data] == shown


@played()
async def test_many_items_and_large_ones_are_read_as_they_were_added(rig: Rig) -> None:
    texts = ["small", "x" * DECODED_BYTES, "ü"] * ROWS + ["last"]
    items = [user(text, id=f"msg_{number}") for number, text in enumerate(texts)]
    conversations, key = rig.service.store.conversations, Key("conv_1", "", 0)
    await conversations.put(key, {"id": "conv_1"}, items[: ROWS + 1])
    await conversations.add_turn(key, items[ROWS + 1 :], [], lambda added, _: added)
    assert (await conversations.whole(key)).items == items
    empty = key._replace(id="conv_2")
    await conversations.put(empty, {"id": "conv_2"}, [])
    assert (await conversations.whole(empty)).items == []


def test_a_deleted_item_is_not_in_the_next_prompt() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        made = await client.conversations.create(items=messages("stays", "goes"))
        await client.conversations.items.delete("msg_goes", conversation_id=made.id)
        await answered(client, made.id, "next")

    (request,) = with_client(scene).ended
    prompt = bytes(request.spec.prompt)
    assert b"stays" in prompt
    assert b"next" in prompt
    assert b"goes" not in prompt


def test_deleted_items_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_BYTES", 1000)

    async def scene(client: openai.AsyncOpenAI) -> None:
        items = client.conversations.items
        made = await client.conversations.create(items=[user("x" * 600, id="msg_x")])
        with pytest.raises(openai.BadRequestError, match="at most 10000 items in 1000 bytes"):
            await items.create(made.id, items=messages("y" * 300))
        assert await texts(client, made.id) == ["x" * 600]
        await items.delete("msg_x", conversation_id=made.id)
        await items.create(made.id, items=messages("y" * 300))
        assert await texts(client, made.id) == ["y" * 300]

    with_client(scene)


@played(Setting(responses=ResponseLimits(count=2, seconds=60)))
async def test_the_items_of_what_is_deleted_are_deleted(rig: Rig) -> None:
    async with client_of(rig) as client:
        for _ in range(3):
            await client.conversations.create(items=messages("a", "b"))
        assert await num_rows(rig, "conversation") == 4, "the oldest has been evicted"
        made = await client.conversations.create(items=messages("c"))
        await client.conversations.delete(made.id)
        assert await num_rows(rig, "conversation") == 2
        for _ in range(3):
            response = await client.responses.create(model=MODEL, input="x")
        assert await num_rows(rig, "response") == 2
        await client.responses.delete(response.id)
        assert await num_rows(rig, "response") == 1
        await asyncio.sleep(60)
        await client.conversations.create()
        assert await num_rows(rig, "conversation") == 0, "those that expired are gone"


def test_changed_items_are_the_same_after_a_restart(tmp_path: Path) -> None:
    setting, made = Setting(store=tmp_path / "store.sqlite"), list[str]()

    async def before(client: openai.AsyncOpenAI) -> None:
        made.append((await client.conversations.create(items=messages("a", "b"))).id)
        await client.conversations.items.delete("msg_a", conversation_id=made[0])
        await client.conversations.items.create(made[0], items=messages("c", "b"))

    async def after(client: openai.AsyncOpenAI) -> None:
        assert await texts(client, made[0]) == ["b", "c", "b"]
        assert (await answered(client, made[0], "d")).output_text == "Hello!"
        assert await texts(client, made[0]) == ["b", "c", "b", "d", "Hello!"]

    with_client(before, setting)
    with_client(after, setting)


@played(Setting(texts=("a", "b", "c")))
async def test_of_two_responses_that_read_a_conversation_at_once_one_is_refused_if_the_other_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations, has_read, go_on = (
        rig.service.store.conversations,
        asyncio.Event(),
        asyncio.Event(),
    )
    read = conversations.items

    async def read_and_wait(key: Key) -> list[Item]:
        found = await read(key)
        if not has_read.is_set():
            has_read.set()
            await go_on.wait()
        return found

    monkeypatch.setattr(type(conversations), "items", lambda _, key: read_and_wait(key))
    async with client_of(rig) as client:
        made = await client.conversations.create()
        first = asyncio.create_task(answered(client, made.id, "first"))
        await has_read.wait()
        await answered(client, made.id, "second")
        go_on.set()
        with pytest.raises(openai.ConflictError):
            await first
        await answered(client, made.id, "third")
        assert (await texts(client, made.id))[::2] == ["second", "third"]
