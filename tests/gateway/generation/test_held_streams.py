import asyncio
from typing import Any

import pytest

from engine.request import Abort
from gateway.access.key_file import Allowance
from gateway.service import Pace
from gateway.store.event_ring import RingLimits
from tests.gateway.rig import CHAT, MODEL, STEP, USER, Rig, Setting, chat, key, played
from tests.wire.response_check import data_of, parsed

NAMED = {"x-conversation-id": "talk-1"}
STORY = "a long story " * 5
LONG = Setting(texts=(STORY,))


def text_of(events: list[Any]) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events if event != "DONE"
    )


def numbers_of(stream: bytes) -> list[int]:
    lines = stream.split(b"\n")
    return [int(line[4:]) for line in lines if line.startswith(b"id: ")]


async def leave_after(rig: Rig, seconds: float, headers: dict[str, str] = NAMED) -> bytes:
    """Begin a stream, and leave; what was sent until then."""
    async with rig.client.post(CHAT, chat(stream=True), headers) as exchange:
        chunks = exchange.chunks()
        pieces = []
        try:
            async with asyncio.timeout(seconds):
                async for piece in chunks:
                    pieces.append(piece)
        except TimeoutError:
            exchange.disconnect()
        await exchange.ended()
    return b"".join(pieces)


async def read(rig: Rig, path: str, headers: dict[str, str] | None = None) -> bytes:
    return (await rig.client.get(path, headers)).content


async def error_of(rig: Rig, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    exchange = await rig.client.get(path, headers)
    return exchange.status, exchange.json["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 50}),
        ("/v1/messages", {"max_tokens": 50, "messages": USER}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize("headers", [{}, NAMED])
@played()
async def test_the_events_of_every_stream_are_numbered(
    rig: Rig, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    asked = {"model": MODEL, "stream": True, **body}
    stream = (await rig.client.post(path, asked, headers)).content
    assert numbers_of(stream) == list(range(stream.count(b"data: ")))


@played(LONG)
async def test_a_named_stream_goes_on_while_no_one_listens_and_is_read_again(rig: Rig) -> None:
    seen = await leave_after(rig, 10.5 * STEP)
    last = numbers_of(seen)[-1]
    await asyncio.sleep(5 * STEP)
    assert len(rig.engine.scheduler.pool) == 1
    rest = await read(rig, "/v1/stream/talk-1", {"last-event-id": str(last)})
    assert numbers_of(seen) + numbers_of(rest) == list(range(len(STORY) + 3))
    whole = await read(rig, "/v1/stream/talk-1")
    assert whole == seen + rest
    assert whole.endswith(b"data: [DONE]\n\n")
    assert await read(rig, f"/v1/stream/talk-1?from={len(seen)}") == rest
    assert [request.abort for request in rig.ended] == [None]


@played(LONG)
async def test_a_post_with_the_last_event_goes_on_after_it(rig: Rig) -> None:
    seen = await leave_after(rig, 6.5 * STEP)
    headers = NAMED | {"last-event-id": str(numbers_of(seen)[-1])}
    rest = (await rig.client.post(CHAT, chat(stream=True), headers)).content
    assert await read(rig, "/v1/stream/talk-1") == seen + rest
    assert len(rig.ended) == 1


@played(LONG)
async def test_several_readers_get_the_same_events(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True), NAMED) as exchange:
        await asyncio.sleep(3.5 * STEP)
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(read(rig, "/v1/stream/talk-1")) for _ in range(3)]
        first = await exchange.read()
    assert [reader.result() for reader in readers] == [first] * 3


@played(LONG)
async def test_a_stream_without_a_name_ends_with_its_client_and_cannot_be_continued(
    rig: Rig,
) -> None:
    await leave_after(rig, 4.5 * STEP, {})
    await asyncio.sleep(STEP)
    assert not rig.engine.scheduler.pool
    exchange = await rig.client.post(CHAT, chat(stream=True), {"last-event-id": "3"})
    assert exchange.json["error"]["param"] == "last-event-id"
    assert [request.abort for request in rig.ended] == [Abort.CLIENT_GONE]


@played(Setting(texts=(STORY, STORY), keys=("a", "b", "c")))
async def test_a_held_stream_belongs_to_its_key(rig: Rig) -> None:
    await leave_after(rig, 4.5 * STEP, NAMED | key("a"))
    for other in (key("b"), key("c")):
        assert (await error_of(rig, "/v1/stream/talk-1", other))[0] == 404
        assert (await rig.client.get("/v1/streams", other)).json["data"] == []
        assert (await rig.client.send("DELETE", "/v1/stream/talk-1", headers=other)).status == 404
    own = NAMED | key("b")
    await rig.client.post(CHAT, chat(stream=True), own)
    (found,) = (await rig.client.get("/v1/streams", key("a"))).json["data"]
    assert (found["id"], found["status"]) == ("talk-1", "completed")


@played(LONG)
async def test_deleting_a_stream_ends_it_and_its_readers(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True), NAMED) as exchange:
        await asyncio.sleep(3.5 * STEP)
        assert (await rig.client.send("DELETE", "/v1/stream/talk-1")).json["deleted"] is True
        *_, last = [event async for event in exchange.events()]
        assert last["error"]["code"] == "request_cancelled"
    await asyncio.sleep(STEP)
    assert not rig.engine.scheduler.pool
    assert (await error_of(rig, "/v1/stream/talk-1"))[0] == 404
    assert rig.service.store.held.rings.num_bytes == 0


@played(Setting(texts=(STORY, "Second.")))
async def test_a_new_request_of_a_conversation_ends_the_one_before(rig: Rig) -> None:
    await leave_after(rig, 3.5 * STEP)
    again = (await rig.client.post(CHAT, chat(stream=True), NAMED)).events
    assert text_of(again) == "Second."
    events = numbers_of(await read(rig, "/v1/stream/talk-1"))
    assert len(events) == len("Second.") + 3
    assert [request.finish is None for request in rig.ended] == [True, False]


@played(Setting(texts=(STORY,), rings=RingLimits(key_bytes=8000)))
async def test_evicted_events_are_an_error_that_names_the_oldest(rig: Rig) -> None:
    await leave_after(rig, 3.5 * STEP)
    await asyncio.sleep(len(STORY) * STEP)
    status, error = await error_of(rig, "/v1/stream/talk-1", {"last-event-id": "0"})
    assert (status, error["code"]) == (410, "events_evicted")
    (stream,) = (await rig.client.get("/v1/streams")).json["data"]
    oldest = stream["oldest_event"]
    assert f"the id {oldest}," in error["message"]
    rest = await read(rig, "/v1/stream/talk-1", {"last-event-id": str(oldest - 1)})
    assert numbers_of(rest) == list(range(oldest, len(STORY) + 3))
    assert rig.service.store.held.rings.num_bytes <= 8000


@played(Setting(texts=(STORY,), rings=RingLimits(key_bytes=25_000)))
async def test_the_rings_of_a_key_never_exceed_its_limit_and_ended_streams_leave_first(
    rig: Rig,
) -> None:
    for name in ("one", "two", "three"):
        await leave_after(rig, 100 * STEP, {"x-conversation-id": name})
        assert rig.service.store.held.rings.num_bytes <= 25_000
    assert (await error_of(rig, "/v1/stream/one"))[0] in (404, 410)
    assert numbers_of(await read(rig, "/v1/stream/three")) == list(range(len(STORY) + 3))


@played(Setting(rings=RingLimits(total_bytes=30_000)))
async def test_nothing_is_kept_of_streams_whose_events_were_evicted(rig: Rig) -> None:
    for number in range(20):
        await leave_after(rig, 100 * STEP, {"x-conversation-id": f"talk-{number}"})
        found = (await rig.client.get("/v1/streams")).json["data"]
        assert 1 <= len(found) <= 5
        assert found[-1]["id"] == f"talk-{number}"
    assert (await error_of(rig, "/v1/stream/talk-0"))[0] == 404
    assert len((await rig.client.get("/v1/streams?conversation_id=talk-19")).json["data"]) == 1


@played(Setting(rings=RingLimits(seconds=60)))
async def test_an_ended_stream_is_forgotten_after_its_time(rig: Rig) -> None:
    await leave_after(rig, 100 * STEP)
    await asyncio.sleep(30)
    assert numbers_of(await read(rig, "/v1/stream/talk-1"))
    await asyncio.sleep(31)
    assert (await error_of(rig, "/v1/stream/talk-1"))[0] == 404
    assert rig.service.store.held.rings.num_bytes == 0


@played()
async def test_a_held_stream_that_is_rejected_answers_with_its_status(rig: Rig) -> None:
    body = chat(stream=True, messages=[{"role": "user", "content": "x" * 500}])
    exchange = await rig.client.post(CHAT, body, NAMED)
    assert exchange.status == 400
    assert exchange.json["error"]["code"] == "context_length_exceeded"
    assert (await error_of(rig, "/v1/stream/talk-1"))[0] == 404
    assert rig.service.store.held.rings.num_bytes == 0


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "é"])
@played()
async def test_an_invalid_conversation_id_is_a_400(rig: Rig, name: str) -> None:
    headers = {"x-conversation-id": name}
    exchange = await rig.client.post(CHAT, chat(stream=True), headers)
    assert exchange.json["error"]["param"] == "x-conversation-id"
    assert exchange.status == 400


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("?from=-1", {}, "from"),
        ("?from=x", {}, "from"),
        ("?from=0", {"last-event-id": "3"}, "from"),
        ("", {"last-event-id": "1e3"}, "last-event-id"),
        ("", {"last-event-id": "9" * 40}, "last-event-id"),
    ],
)
@played()
async def test_an_invalid_place_in_a_stream_is_a_400(
    rig: Rig, query: str, headers: dict[str, str], param: str
) -> None:
    await leave_after(rig, 100 * STEP)
    status, error = await error_of(rig, f"/v1/stream/talk-1{query}", headers)
    assert (status, error["param"]) == (400, param)


@played()
async def test_a_place_after_the_end_of_a_stream_is_its_end(rig: Rig) -> None:
    await leave_after(rig, 100 * STEP)
    assert await read(rig, "/v1/stream/talk-1?from=999999") == b""
    assert await read(rig, "/v1/stream/talk-1", {"last-event-id": "999999"}) == b""


@played(Setting(texts=(STORY,), allowance=Allowance(max_concurrent=1)))
async def test_a_stream_without_a_reader_counts_as_running(rig: Rig) -> None:
    await leave_after(rig, 3.5 * STEP)
    assert (await rig.client.post(CHAT, chat())).status == 429
    await asyncio.sleep(len(STORY) * STEP)
    assert (await rig.client.post(CHAT, chat())).status == 200


@played(Setting(texts=("Hi",), step=5.0, pace=Pace(hold=1, ping=2, stall=60)))
async def test_pings_reach_the_readers_of_a_silent_stream(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True), NAMED) as exchange:
        writes = [(rig.service.clock(), piece) async for piece in exchange.chunks()]
    assert writes[:2] == [(2.0, b": ping\n\n"), (4.0, b": ping\n\n")]
    assert await read(rig, "/v1/stream/talk-1") == b"".join(piece for _, piece in writes)


@played(Setting(texts=(STORY,), pace=Pace(hold=1, ping=2, stall=3)))
async def test_a_reader_that_does_not_read_leaves_and_the_stream_goes_on(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True), NAMED) as exchange:
        await exchange.start()
        exchange.pause()
        await exchange.ended()
        exchange.resume()
    assert text_of_stream(await read(rig, "/v1/stream/talk-1")) == STORY


def text_of_stream(stream: bytes) -> str:
    return text_of([parsed(data) for frame in stream.split(b"\n\n") if (data := data_of(frame))])
