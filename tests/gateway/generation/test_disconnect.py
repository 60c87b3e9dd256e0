import asyncio
import gc
from typing import Any

import orjson
import pytest

from engine.control.admission import Admission
from engine.request import Abort, State
from gateway.generation.event_stream import EventStream
from gateway.service import Pace
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, played, text
from tests.gateway.serve.recording import without_collector
from tests.wire.response_check import data_of

LONG = "a long story " * 10
STREAMED_OR_NOT = pytest.mark.parametrize("stream", [True, False])
MOMENTS = pytest.mark.parametrize("after", [0.0, STEP / 2, STEP, 2.5 * STEP, 7.1 * STEP])


@STREAMED_OR_NOT
@MOMENTS
@played(Setting(texts=(LONG,)))
async def test_a_disconnect_ends_the_request_at_once(rig: Rig, stream: bool, after: float) -> None:
    async with rig.client.post(CHAT, chat(stream=stream)) as exchange:
        await asyncio.sleep(after)
        exchange.disconnect()
        await exchange.ended()
        assert rig.service.clock() == after
    await asyncio.sleep(STEP)
    assert all(request.abort is Abort.CLIENT_GONE for request in rig.ended)
    assert all(count in (0, 1) for count in rig.metrics.requests.aborts.values())
    assert rig.metrics.requests.cancel_to_free.sum <= 1


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("num_choices", [1, 3])
@played(Setting(texts=("a short story",)))
async def test_a_stream_is_freed_without_the_garbage_collector(
    rig: Rig, num_choices: int, leaves: bool
) -> None:
    with without_collector():
        async with rig.client.post(CHAT, chat(stream=True, n=num_choices)) as exchange:
            await asyncio.sleep(2.5 * STEP)
            if not leaves:
                await exchange.read()
        await asyncio.sleep(STEP)
        del exchange
        assert not [each for each in gc.get_objects() if isinstance(each, EventStream)]


@STREAMED_OR_NOT
@played(Setting(texts=(LONG,)))
async def test_every_choice_of_a_response_is_cancelled(rig: Rig, stream: bool) -> None:
    body = text(prompt=["ab", "cd"], n=2, stream=stream, max_tokens=100)
    async with rig.client.post(TEXT, body):
        await asyncio.sleep(3.5 * STEP)
        assert rig.engine.scheduler.pool.count(State.RUNNING) == 4
    await asyncio.sleep(STEP)
    assert [request.abort for request in rig.ended] == [Abort.CLIENT_GONE] * 4


@STREAMED_OR_NOT
@played(Setting(texts=(LONG,), num_blocks=30, admission=Admission.RESERVE))
async def test_a_request_whose_client_disconnects_in_the_queue_never_runs(
    rig: Rig, stream: bool
) -> None:
    async with rig.client.post(CHAT, chat(max_tokens=20)) as first:
        await asyncio.sleep(1.5 * STEP)
        async with rig.client.post(CHAT, chat(stream=stream, max_tokens=20)):
            await asyncio.sleep(STEP)
            assert rig.engine.scheduler.pool.count(State.WAITING) == 1
        assert rig.engine.scheduler.pool.count(State.WAITING) == 0
        body = await first.json()
        assert body["choices"][0]["message"]["content"] == LONG[:20]
    assert rig.ended[0].times.admitted_at is None


@STREAMED_OR_NOT
@played()
async def test_a_disconnect_during_tokenization_adds_no_request(rig: Rig, stream: bool) -> None:
    started, left = asyncio.Event(), asyncio.Event()

    async def slowly(*_: object, **__: object) -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.generation.plan.tokenize_chat", slowly)
        async with rig.client.post(CHAT, chat(stream=stream)) as exchange:
            await started.wait()
            exchange.disconnect()
            await exchange.ended()
    assert left.is_set()
    assert rig.ended == []


@played()
async def test_a_disconnect_ends_tokenize(rig: Rig) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def slowly(*_: object) -> Any:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.web.routes.tokens._ids", slowly)
        async with rig.client.post("/tokenize", {"prompt": LONG}) as exchange:
            await started.wait()
            exchange.disconnect()
            await exchange.ended()
    assert ended.is_set()


@played()
async def test_a_disconnect_in_the_middle_of_the_body_ends_the_exchange(rig: Rig) -> None:
    headers = {"content-type": "application/json"}
    async with rig.client.send("POST", CHAT, [b'{"model":'], headers) as exchange:
        exchange.disconnect()
        await exchange.ended()


@played(Setting(texts=(LONG,)))
async def test_a_disconnect_while_a_write_is_blocked_ends_the_request(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True)) as exchange:
        await exchange.start()
        exchange.pause()
        await asyncio.sleep(5 * STEP)
        exchange.disconnect()
        await exchange.ended()
    (request,) = rig.ended
    assert request.abort is Abort.CLIENT_GONE


@played(Setting(texts=(LONG,)))
async def test_a_slow_reader_gets_merged_tokens_and_delays_no_other_request(rig: Rig) -> None:
    async with (
        rig.client.post(CHAT, chat(stream=True)) as slow,
        rig.client.post(CHAT, chat(stream=True)) as fast,
    ):
        await slow.start()
        slow.pause()
        times = [rig.service.clock() async for _ in fast.chunks()]
        assert times == [STEP * n for n in range(1, len(LONG) + 2)]
        slow.resume()
        writes = [chunk async for chunk in slow.chunks()]
    content = "".join(content_of(write) for write in writes)
    assert content == LONG
    assert len(writes) < 5


def content_of(write: bytes) -> str:
    pieces = []
    for frame in write.split(b"\n\n"):
        if (data := data_of(frame)).startswith(b"{"):
            (choice,) = orjson.loads(data)["choices"]
            pieces.append(choice["delta"].get("content", ""))
    return "".join(pieces)


@played(Setting(texts=(LONG,), pace=Pace(hold=1, ping=2, stall=5)))
async def test_a_stream_whose_writes_stay_blocked_is_ended(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True)) as exchange:
        await exchange.start()
        exchange.pause()
        await exchange.ended()
        assert rig.service.clock() == 1 + 3 * 2
    assert rig.ended[0].abort is Abort.SLOW_CLIENT


@played(
    Setting(
        texts=(LONG,),
        num_blocks=28,
        admission=Admission.RESERVE,
        pace=Pace(hold=1, ping=2, stall=60),
    )
)
async def test_a_silent_stream_is_kept_alive_with_comments(rig: Rig) -> None:
    async with (
        rig.client.post(CHAT, chat(max_tokens=20)) as first,
        rig.client.post(CHAT, chat(stream=True, max_tokens=2)) as second,
    ):
        writes = [(rig.service.clock(), chunk) async for chunk in second.chunks()]
        await first.json()
    assert writes[:2] == [(3.0, b": ping\n\n"), (5.0, b": ping\n\n")]
    assert writes[-1][1].endswith(b"[DONE]\n\n")
