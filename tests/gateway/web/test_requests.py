import asyncio

import pytest

from engine.request import Abort
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, key, played, text

LONG = "a long story " * 10
NAME = {"x-request-id": "mine/1"}
CANCEL = "/v1/requests/mine/1/cancel"


@played(Setting(texts=(LONG,)))
async def test_a_cancelled_stream_ends_with_an_error_event(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True), NAME) as exchange:
        await asyncio.sleep(3.5 * STEP)
        cancelling = await rig.client.post(CANCEL, b"")
        result = cancelling.json
        *chunks, last = [event async for event in exchange.events()]
    assert (cancelling.status, result["id"], result["cancelled"]) == (200, "mine/1", True)
    assert result["num_choices"] == 1
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == LONG[:3]
    assert last["error"]["code"] == "request_cancelled"
    assert rig.service.clock() == 3.5 * STEP
    await asyncio.sleep(STEP)
    assert [request.abort for request in rig.ended] == [Abort.EXPLICIT]
    assert rig.metrics.requests.cancel_to_free.sum <= 1


@played(Setting(texts=(LONG,)))
async def test_every_choice_of_a_whole_response_is_cancelled(rig: Rig) -> None:
    body = text(prompt=["ab", "cd"], n=2, max_tokens=100)
    async with rig.client.post(TEXT, body, NAME) as exchange:
        await asyncio.sleep(3.5 * STEP)
        assert (await rig.client.post(CANCEL, b"")).json["num_choices"] == 4
        reply = await exchange.json()
    assert exchange.status == 499
    assert reply["error"]["code"] == "request_cancelled"
    await asyncio.sleep(STEP)
    assert [request.abort for request in rig.ended] == [Abort.EXPLICIT] * 4


@played(Setting(texts=(LONG,), max_batch_size=1))
async def test_a_queued_request_is_cancelled_before_it_runs(rig: Rig) -> None:
    async with (
        rig.client.post(CHAT, chat(max_tokens=20)) as first,
        rig.client.post(CHAT, chat(), NAME) as second,
    ):
        await asyncio.sleep(STEP)
        assert (await rig.client.post(CANCEL, b"")).status == 200
        assert await second.start() == 499
        assert await first.start() == 200
    assert rig.ended[0].times.admitted_at is None


@pytest.mark.parametrize("path", ["/v1/requests/nobody/cancel", "/v1/requests/req_1/cancel"])
def test_an_unknown_request_is_not_found(path: str) -> None:
    answer = answer_to(path, b"")
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (404, "request_not_found")


@played()
async def test_an_ended_request_is_not_found(rig: Rig) -> None:
    assert (await rig.client.post(CHAT, chat(), NAME)).status == 200
    assert (await rig.client.post(CANCEL, b"")).status == 404


@played(Setting(texts=(LONG,), keys=("a",), admin_keys=("root",)))
async def test_an_admin_key_cancels_requests_of_other_keys(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(max_tokens=9), NAME | key("a")) as exchange:
        await asyncio.sleep(STEP)
        assert (await rig.client.post(CANCEL, b"", key("root"))).status == 200
        assert await exchange.start() == 499


@played(Setting(texts=(LONG,), keys=("a", "b")))
async def test_another_key_can_neither_cancel_nor_detect_a_request(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(max_tokens=9), NAME | key("a")) as exchange:
        await asyncio.sleep(STEP)
        assert (await rig.client.post(CANCEL, b"", key("b"))).status == 404
        assert (await exchange.json())["choices"][0]["finish_reason"] == "length"
