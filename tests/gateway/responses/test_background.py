import asyncio
from typing import Any

import orjson
import pytest

from engine.control.admission import Admission
from engine.request import Abort
from tests.gateway.responses.asking import PATH, got
from tests.gateway.rig import MODEL, STEP, Rig, Setting, played

STORY = "a long story " * 5
LONG = Setting(texts=(STORY,))
STREAMED_OR_NOT = pytest.mark.parametrize("stream", [True, False])


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", "background": True, **fields}


async def begun(rig: Rig, **fields: Any) -> Any:
    """A response that the engine has accepted; its client leaves."""
    async with rig.client.post(PATH, ask(**fields)) as exchange:
        assert await exchange.start() == 200
        if not fields.get("stream"):
            return await exchange.json()
        async for event in exchange.events():
            return event["response"]


async def posted(rig: Rig, path: str) -> tuple[int, Any]:
    exchange = await rig.client.post(f"{PATH}/{path}", {})
    return exchange.status, exchange.json


async def events_after(rig: Rig, response_id: str, number: int | None = None) -> list[Any]:
    place = "" if number is None else f"&starting_after={number}"
    exchange = await rig.client.get(f"{PATH}/{response_id}?stream=true{place}")
    assert exchange.status == 200
    return exchange.events


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@STREAMED_OR_NOT
@played(LONG)
async def test_a_response_in_the_background_goes_on_and_can_be_polled(
    rig: Rig, stream: bool
) -> None:
    response = await begun(rig, stream=stream)
    assert (response["status"], response["background"]) == ("queued", True)
    await asyncio.sleep(5.5 * STEP)
    status, now = await got(rig, response["id"])
    assert (status, now["status"]) == (200, "in_progress")
    await asyncio.sleep(len(STORY) * STEP)
    _, done = await got(rig, response["id"])
    assert (done["status"], text_of(done)) == ("completed", STORY)
    assert [request.abort for request in rig.ended] == [None]


@STREAMED_OR_NOT
@played(LONG)
async def test_its_events_can_be_read_from_any_number_on_at_any_time(
    rig: Rig, stream: bool
) -> None:
    response = await begun(rig, stream=stream)
    during = await events_after(rig, response["id"])
    after = await events_after(rig, response["id"])
    assert during == after
    assert [event["sequence_number"] for event in after] == list(range(len(after)))
    kinds = [event["type"].removeprefix("response.") for event in after]
    assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert kinds[-1] == "completed"
    states = [event["response"]["status"] for event in after if "response" in event]
    assert states == ["queued", "queued", "in_progress", "completed"]
    for number in (0, 17, len(after) - 2):
        assert await events_after(rig, response["id"], number) == after[number + 1 :]


@played(Setting(texts=(STORY,), num_blocks=30, admission=Admission.RESERVE))
async def test_it_is_queued_until_the_engine_begins_with_it(rig: Rig) -> None:
    first = await begun(rig, max_output_tokens=20)
    second = await begun(rig, max_output_tokens=5)
    await asyncio.sleep(3.5 * STEP)
    assert (await got(rig, first["id"]))[1]["status"] == "in_progress"
    assert (await got(rig, second["id"]))[1]["status"] == "queued"
    await asyncio.sleep(40 * STEP)
    assert (await got(rig, second["id"]))[1]["status"] == "incomplete"


@played(LONG)
async def test_it_can_be_cancelled_and_cancelled_again(rig: Rig) -> None:
    response = await begun(rig)
    await asyncio.sleep(5.5 * STEP)
    cancelled = (await posted(rig, f"{response['id']}/cancel"))[1]
    assert cancelled["status"] == "cancelled"
    assert [item["status"] for item in cancelled["output"]] == ["incomplete"]
    await asyncio.sleep(STEP)
    status, again = await posted(rig, f"{response['id']}/cancel")
    assert (status, again["status"]) == (200, "cancelled")
    assert (await got(rig, response["id"]))[1]["status"] == "cancelled"
    *_, last = await events_after(rig, response["id"])
    assert last["response"]["status"] == "cancelled"
    assert [request.abort for request in rig.ended] == [Abort.EXPLICIT]


@played(LONG)
async def test_deleting_it_ends_it_and_nothing_of_it_stays(rig: Rig) -> None:
    response = await begun(rig)
    await asyncio.sleep(5.5 * STEP)
    assert (await rig.client.send("DELETE", f"{PATH}/{response['id']}")).json["deleted"] is True
    await asyncio.sleep(STEP)
    assert not rig.engine.scheduler.pool
    assert (await got(rig, response["id"]))[0] == 404
    assert (await got(rig, f"{response['id']}?stream=true"))[0] == 404
    assert rig.service.store.held.rings.num_bytes == 0


@played(Setting(texts=(STORY,), keys=("a", "b")))
async def test_another_key_finds_no_trace_of_it(rig: Rig) -> None:
    response = (await rig.client.post(PATH, ask(), {"x-api-key": "a"})).json
    other = {"x-api-key": "b"}
    assert (await got(rig, response["id"], other))[0] == 404
    assert (await got(rig, f"{response['id']}?stream=true", other))[0] == 404
    path = f"{PATH}/{response['id']}"
    assert (await rig.client.post(f"{path}/cancel", {}, other)).status == 404
    assert (await rig.client.send("DELETE", path, headers=other)).status == 404


@played()
async def test_it_answers_with_the_status_of_its_rejection(rig: Rig) -> None:
    exchange = await rig.client.post(PATH, ask(input="x" * 500))
    assert exchange.status == 400
    assert exchange.json["error"]["code"] == "context_length_exceeded"
    assert rig.service.store.held.rings.num_bytes == 0


@played()
async def test_the_events_of_a_response_in_the_foreground_are_not_held(rig: Rig) -> None:
    response = (await rig.client.post(PATH, ask(background=False))).json
    status, error = await got(rig, f"{response['id']}?stream=true")
    assert (status, error["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("place", ["-1", "x", "1.5"])
@played()
async def test_an_invalid_starting_after_is_a_400(rig: Rig, place: str) -> None:
    response = await begun(rig)
    path = f"{response['id']}?stream=true&starting_after={place}"
    status, error = await got(rig, path)
    assert (status, error["error"]["param"]) == (400, "starting_after")


@played()
async def test_a_later_response_continues_it(rig: Rig) -> None:
    first = await begun(rig)
    await asyncio.sleep(20 * STEP)
    second = (await rig.client.post(PATH, ask(previous_response_id=first["id"]))).json
    await asyncio.sleep(20 * STEP)
    _, page = await got(rig, f"{second['id']}/input_items")
    assert orjson.dumps(page["data"]).count(b"Hello!") == 1
