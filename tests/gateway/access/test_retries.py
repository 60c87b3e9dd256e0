import asyncio
from typing import Any

import pytest

from engine.request import Abort
from gateway.access.key_file import Allowance
from tests.gateway.rig import CHAT, MODEL, STEP, USER, Rig, Setting, chat, play, played

KEYED = {"idempotency-key": "x"}
LONG = Setting(texts=("a long story " * 5,))
STREAMED_OR_NOT = pytest.mark.parametrize("stream", [True, False])


@STREAMED_OR_NOT
@played(LONG)
async def test_a_retry_takes_over_what_is_in_flight(
    rig: Rig, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    body = chat(stream=stream)
    async with rig.client.post(CHAT, body, KEYED | {"x-request-id": "one"}) as earlier:
        await asyncio.sleep(3.5 * STEP)
        async with rig.client.post(CHAT, body, KEYED | {"x-request-id": "two"}) as later:
            await asyncio.sleep(2 * STEP)
            assert len(rig.engine.scheduler.pool) == 1
            await check_superseded(earlier, stream)
            if stream:
                events = [event async for event in later.events()]
                answer = "".join(content_of(event) for event in events)
                assert events[-1] == "DONE"
            else:
                answer = (await later.json())["choices"][0]["message"]["content"]
        assert later.status == 200
        assert answer == LONG.texts[0]
    assert [request.abort for request in rig.ended] == [None]
    assert "one superseded by two: same idempotency-key" in caplog.messages


def content_of(event: Any) -> str:
    return "" if event == "DONE" else event["choices"][0]["delta"].get("content") or ""


@STREAMED_OR_NOT
@played(LONG)
async def test_the_last_client_that_leaves_ends_what_was_taken_over(rig: Rig, stream: bool) -> None:
    body = chat(stream=stream)
    async with rig.client.post(CHAT, body, KEYED) as earlier:
        await asyncio.sleep(2.5 * STEP)
        async with rig.client.post(CHAT, body, KEYED) as later:
            await check_superseded(earlier, stream)
            await asyncio.sleep(STEP)
            assert len(rig.engine.scheduler.pool) == 1
            later.disconnect()
            await later.ended()
    await asyncio.sleep(STEP)
    assert not rig.engine.scheduler.pool
    assert [request.abort for request in rig.ended] == [Abort.CLIENT_GONE]
    assert rig.metrics.requests.cancel_to_free.sum <= 1


@played(LONG)
async def test_a_retry_of_a_stream_goes_on_after_the_event_that_it_names(rig: Rig) -> None:
    body = chat(stream=True)
    async with rig.client.post(CHAT, body, KEYED) as earlier:
        await asyncio.sleep(4.5 * STEP)
        async with rig.client.post(CHAT, body, KEYED | {"last-event-id": "2"}) as later:
            answer = [content_of(event) async for event in later.events()]
        await earlier.read()
    assert "".join(answer) == LONG.texts[0][2:]  # event 0 has the role


async def check_superseded(earlier: Any, stream: bool) -> None:
    """A client that still reads the earlier attempt gets the reason."""
    if stream:
        *_, last = [event async for event in earlier.events()]
        assert earlier.status == 200
    else:
        last = await earlier.json()
        assert earlier.status == 409
        assert earlier.headers["x-should-retry"] == "false"
    assert last["error"]["code"] == "superseded"


@pytest.mark.parametrize("count", ["0", "1", "2", "nonsense"])
@played(LONG)
async def test_an_equal_request_without_idempotency_key_ends_no_other(rig: Rig, count: str) -> None:
    """Two users behind one proxy may send the same body, and one of them may be a retry."""
    async with rig.client.post(CHAT, chat()) as one:
        await asyncio.sleep(2 * STEP)
        async with rig.client.post(CHAT, chat(), {"x-stainless-retry-count": count}) as other:
            assert await other.start() == 200
            assert await one.start() == 200
    assert {request.outcome for request in rig.ended} == {"finished"}


@played()
async def test_a_retry_of_a_stream_that_has_not_begun_ends_it_with_a_409(rig: Rig) -> None:
    body = chat(stream=True)
    async with rig.client.post(CHAT, body, KEYED) as earlier:
        await asyncio.sleep(STEP / 2)
        async with rig.client.post(CHAT, body, KEYED) as later:
            await earlier.json()
            assert earlier.status == 409
            await later.read()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/completions", KEYED),
        (CHAT, {"idempotency-key": "y"}),
        (CHAT, {"idempotency-key": "x" * 300}),
    ],
)
@played()
async def test_another_path_or_key_is_another_request(
    rig: Rig, path: str, headers: dict[str, str]
) -> None:
    first = {"idempotency-key": "x" * 299 + "y"} if len(str(headers)) > 300 else KEYED
    async with rig.client.post(CHAT, chat(), first) as one:
        await asyncio.sleep(STEP / 2)
        await rig.client.post(path, chat(), headers)
        await one.json()
        assert one.status == 200


@played(LONG)
async def test_a_third_attempt_replaces_the_second(rig: Rig) -> None:
    attempts = [rig.client.post(CHAT, chat(), KEYED) for _ in range(3)]
    async with attempts[0]:
        await asyncio.sleep(STEP)
        async with attempts[1]:
            await asyncio.sleep(STEP)
            async with attempts[2]:
                statuses = [await each.start() for each in attempts]
    assert statuses == [409, 409, 200]


def test_many_retries_are_computed_once() -> None:
    async def scene(rig: Rig) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(attempt(rig))
                await asyncio.sleep(1.5 * STEP)
                assert len(rig.engine.scheduler.pool) <= 1

    async def attempt(rig: Rig) -> None:
        await rig.client.post(CHAT, chat(), KEYED)

    rig = play(scene, LONG)
    assert sum(request.finish is not None for request in rig.ended) == 1


@played()
async def test_an_idempotency_key_of_a_running_request_with_another_body_is_rejected(
    rig: Rig,
) -> None:
    headers = {"idempotency-key": "x"}
    async with rig.client.post(CHAT, chat(seed=1), headers) as one:
        await asyncio.sleep(STEP / 2)
        other = await rig.client.post(CHAT, chat(seed=2), headers)
        assert other.json["error"]["param"] == "idempotency-key"
        assert other.status == 400
        await one.json()
        assert one.status == 200
    later = await rig.client.post(CHAT, chat(seed=2), headers)
    assert later.status == 200


@played(Setting(keys=("a", "b")))
async def test_the_same_idempotency_key_of_another_api_key_is_another_request(rig: Rig) -> None:
    headers = {"idempotency-key": "x"}
    async with rig.client.post(CHAT, chat(), headers | {"x-api-key": "a"}) as one:
        await asyncio.sleep(STEP / 2)
        async with rig.client.post(CHAT, chat(), headers | {"x-api-key": "b"}) as other:
            await other.json()
            await one.json()
            assert (one.status, other.status) == (200, 200)


@played(Setting(allowance=Allowance(max_concurrent=1)))
async def test_the_newer_attempt_counts_against_the_limits(rig: Rig) -> None:
    """Otherwise a retry would bypass them; the older one leaves when it ends."""
    async with rig.client.post(CHAT, chat(), KEYED) as one:
        await asyncio.sleep(STEP / 2)
        assert (await rig.client.post(CHAT, chat(), KEYED)).status == 429
        await one.json()
        assert one.status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 50, "messages": USER}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 50}),
    ],
)
@played(LONG)
async def test_every_api_ends_a_superseded_stream_with_its_own_error_event(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    """The check of each exchange verifies the shapes of these events."""
    asked = {"model": MODEL, "stream": True, **body}
    async with rig.client.post(path, asked, KEYED) as earlier:
        await asyncio.sleep(5 * STEP)
        async with rig.client.post(path, asked, KEYED) as later:
            *_, last = [event async for event in earlier.events()]
            assert "retried" in str(last)
            await later.read()
