import asyncio
from itertools import pairwise
from typing import Any

import pytest

from engine.request import ENDS_AT_ONCE, Abort, State
from gateway.generation.choices import SPECS_AT_ONCE
from gateway.web.middleware import ThreadWork
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, key, play, played, text

LONG = "a long story " * 10
MANY = 4 * ENDS_AT_ONCE
QUEUE = Setting(texts=(LONG,), max_queue_requests=MANY, keys=("a", "b"))


def many(**fields: Any) -> dict[str, Any]:
    return text(prompt=["ab"] * MANY, max_tokens=100, **fields)


@played(QUEUE)
async def test_many_requests_of_a_client_that_leaves_end_a_few_at_a_time(rig: Rig) -> None:
    async with rig.client.post(TEXT, many(), key("a")) as exchange:
        await asyncio.sleep(1.5 * STEP)
        assert len(rig.engine.scheduler.pool) == MANY
        exchange.disconnect()
        counts = [0]
        while counts[-1] < MANY - QUEUE.max_batch_size:  # those that run end with their step
            await asyncio.sleep(0)
            counts.append(len(rig.ended))
        assert max(after - before for before, after in pairwise(counts)) <= ENDS_AT_ONCE
        await exchange.ended()
    assert {request.abort for request in rig.ended} == {Abort.CLIENT_GONE}


@played(QUEUE)
async def test_many_requests_that_are_cancelled_by_name_end_a_few_at_a_time(rig: Rig) -> None:
    headers = key("a") | {"x-request-id": "mine"}
    async with rig.client.post(TEXT, many(), headers) as exchange:
        await asyncio.sleep(1.5 * STEP)
        assert rig.engine.cancel("mine", None) == MANY
        assert len(rig.ended) + rig.engine.scheduler.pool.count(State.LEAVING) == ENDS_AT_ONCE
        await exchange.read()
        assert exchange.status == 499
    await asyncio.sleep(STEP)
    assert len(rig.ended) == MANY


@played(QUEUE)
async def test_many_requests_whose_deadline_passes_end_a_few_at_a_time(rig: Rig) -> None:
    async with rig.client.post(TEXT, many(deadline_ms=300), key("a")) as exchange:
        await asyncio.sleep(0.299)
        scheduler = rig.engine.scheduler
        assert len(scheduler.expire(rig.service.clock() + 1.0)) == ENDS_AT_ONCE
        await exchange.read()
        assert exchange.status == 504
    await asyncio.sleep(STEP)
    assert len(rig.ended) == MANY


@pytest.mark.parametrize("stream", [False, True])
@played(QUEUE)
async def test_what_a_full_queue_has_no_room_for_is_not_built(rig: Rig, stream: bool) -> None:
    async with rig.client.post(TEXT, many(), key("a")):
        await asyncio.sleep(0.5 * STEP)
        before = rig.engine.scheduler.arrivals.queue.next_request_id
        second = await rig.client.post(TEXT, many(stream=stream), key("a"))
        assert second.json["error"]["code"] == "overloaded"
        assert second.status == 503
        assert rig.engine.scheduler.arrivals.queue.next_request_id == before
        async with rig.client.post(CHAT, chat(max_tokens=1), key("b")) as other:
            await asyncio.sleep(0)
            assert await other.start() == 200, "a client with less than its share"


@pytest.mark.parametrize("has_others", [False, True])
def test_requests_are_added_in_their_clients_share_of_the_loop_beside_those_of_others(
    has_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[str] = []

    async def pause(work: ThreadWork) -> None:
        pauses.append(work.client)
        await asyncio.sleep(0)

    monkeypatch.setattr(ThreadWork, "pause", pause)

    async def scene(rig: Rig) -> None:
        async with rig.client.post(CHAT, chat(max_tokens=50), key("b" if has_others else "a")):
            await asyncio.sleep(0.5 * STEP)
            async with rig.client.post(TEXT, many(), key("a")):
                await asyncio.sleep(STEP)

    play(scene, QUEUE)
    # Between those that are built, and between those that are added
    assert len(pauses) == (2 * MANY // SPECS_AT_ONCE - 1 if has_others else 0)
