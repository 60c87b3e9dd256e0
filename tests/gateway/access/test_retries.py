"""A request that is sent again while its first try runs is computed once."""

import asyncio
from typing import Any

import pytest

from engine.request import Abort
from gateway.access.keys import Allowance
from tests.gateway.rig import CHAT, MODEL, STEP, USER, Rig, Setting, chat, play

FIRST = {"x-stainless-retry-count": "0"}
AGAIN = {"x-stainless-retry-count": "1"}
LONG = Setting(texts=("a long story " * 5,))
STREAMED_OR_NOT = pytest.mark.parametrize("stream", [True, False])


@pytest.mark.parametrize(
    ("first", "again"), [(FIRST, AGAIN), ({}, AGAIN), ({"idempotency-key": "x"},) * 2]
)
@STREAMED_OR_NOT
def test_a_retry_takes_the_place_of_the_try_before(
    stream: bool, first: dict[str, str], again: dict[str, str]
) -> None:
    async def scene(rig: Rig) -> None:
        body = chat(stream=stream)
        async with rig.client.post(CHAT, body, first) as earlier:
            await asyncio.sleep(3.5 * STEP)
            async with rig.client.post(CHAT, body, again) as later:
                await asyncio.sleep(2 * STEP)
                assert len(rig.engine.scheduler.pool) == 1
                await _dismissed(earlier, stream)
                answer = await later.read()
            assert later.status == 200
            assert b"a long story" in answer or b'" story"' in answer or stream

    rig = play(scene, LONG)
    assert [request.abort for request in rig.ended] == [Abort.CLIENT_GONE, None]
    assert rig.metrics.cancel_to_free.sum <= 1


async def _dismissed(earlier: Any, stream: bool) -> None:
    """Whoever still listens to the earlier try hears why it ends."""
    if stream:
        *_, last = [event async for event in earlier.events()]
        assert earlier.status == 200
    else:
        last = await earlier.json()
        assert earlier.status == 409
        assert earlier.headers["x-should-retry"] == "false"
    assert last["error"]["code"] == "superseded"


def test_a_retry_of_a_stream_that_has_not_begun_ends_it_with_a_409() -> None:
    async def scene(rig: Rig) -> None:
        body = chat(stream=True)
        async with rig.client.post(CHAT, body) as earlier:
            await asyncio.sleep(STEP / 2)
            async with rig.client.post(CHAT, body, AGAIN) as later:
                await earlier.json()
                assert earlier.status == 409
                await later.read()

    play(scene)


@pytest.mark.parametrize(
    "changes",
    [
        {"headers": FIRST},
        {"headers": {"x-stainless-retry-count": "nonsense"}},
        {"headers": AGAIN, "body": {"seed": 2}},
        {"headers": AGAIN, "path": "/v1/completions"},
    ],
)
def test_what_is_not_the_same_request_again_leaves_the_other_alone(changes: Any) -> None:
    async def scene(rig: Rig) -> None:
        async with rig.client.post(CHAT, chat(seed=1), FIRST) as one:
            await asyncio.sleep(STEP / 2)
            path = changes.get("path", CHAT)
            body = chat(seed=1) | changes.get("body", {})
            async with rig.client.post(path, body, changes["headers"]) as other:
                await other.read()
            await one.json()
            assert one.status == 200

    play(scene)


def test_of_twins_none_is_taken_for_the_earlier_try() -> None:
    async def scene(rig: Rig) -> None:
        twins = [rig.client.post(CHAT, chat(seed=1), headers) for headers in (FIRST, FIRST, AGAIN)]
        async with twins[0], twins[1], twins[2]:
            for twin in twins:
                await twin.json()
                assert twin.status == 200

    play(scene)


def test_a_third_try_takes_the_place_of_the_second() -> None:
    async def scene(rig: Rig) -> None:
        tries = [
            rig.client.post(CHAT, chat(), {"x-stainless-retry-count": str(count)})
            for count in range(3)
        ]
        async with tries[0]:
            await asyncio.sleep(STEP)
            async with tries[1]:
                await asyncio.sleep(STEP)
                async with tries[2]:
                    statuses = [await each.start() for each in tries]
        assert statuses == [409, 409, 200]

    play(scene, LONG)


def test_a_storm_of_retries_costs_one_answer() -> None:
    async def scene(rig: Rig) -> None:
        async with asyncio.TaskGroup() as group:
            for count in range(20):
                group.create_task(one_try(rig, count))
                await asyncio.sleep(1.5 * STEP)
                assert len(rig.engine.scheduler.pool) <= 1

    async def one_try(rig: Rig, count: int) -> None:
        headers = {"x-stainless-retry-count": str(count)}
        async with rig.client.post(CHAT, chat(), headers) as exchange:
            await exchange.read()

    rig = play(scene, LONG)
    assert sum(request.finish is not None for request in rig.ended) == 1


def test_an_idempotency_key_may_not_mean_two_things_at_once() -> None:
    async def scene(rig: Rig) -> None:
        headers = {"idempotency-key": "x"}
        async with rig.client.post(CHAT, chat(seed=1), headers) as one:
            await asyncio.sleep(STEP / 2)
            async with rig.client.post(CHAT, chat(seed=2), headers) as other:
                assert (await other.json())["error"]["param"] == "idempotency-key"
                assert other.status == 400
            await one.json()
            assert one.status == 200
        async with rig.client.post(CHAT, chat(seed=2), headers) as later:
            await later.json()
            assert later.status == 200

    play(scene)


def test_another_keys_request_is_another_request() -> None:
    async def scene(rig: Rig) -> None:
        headers = {"idempotency-key": "x"}
        async with rig.client.post(CHAT, chat(), headers | {"x-api-key": "a"}) as one:
            await asyncio.sleep(STEP / 2)
            async with rig.client.post(CHAT, chat(), headers | {"x-api-key": "b"}) as other:
                await other.json()
                await one.json()
                assert (one.status, other.status) == (200, 200)

    play(scene, Setting(keys=("a", "b")))


def test_the_newer_try_counts_against_the_limits() -> None:
    """Else a retry would be a way around them; the older one makes room when it ends."""

    async def scene(rig: Rig) -> None:
        async with rig.client.post(CHAT, chat(), FIRST) as one:
            await asyncio.sleep(STEP / 2)
            async with rig.client.post(CHAT, chat(), AGAIN) as again:
                assert await again.start() == 429
            await one.json()
            assert one.status == 200

    play(scene, Setting(allowance=Allowance(max_concurrent=1)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 50, "messages": USER}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 50}),
    ],
)
def test_every_api_ends_a_superseded_stream_with_its_own_error_event(
    path: str, body: dict[str, Any]
) -> None:
    """The witness of each exchange knows those words."""

    async def scene(rig: Rig) -> None:
        asked = {"model": MODEL, "stream": True, **body}
        async with rig.client.post(path, asked) as earlier:
            await asyncio.sleep(5 * STEP)
            async with rig.client.post(path, asked, AGAIN) as later:
                *_, last = [event async for event in earlier.events()]
                assert "retried" in str(last)
                await later.read()

    play(scene, LONG)
