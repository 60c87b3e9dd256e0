import asyncio
import json
from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from engine.request import Abort
from gateway.service import Pace
from tests.gateway.rig import CHAT, MODEL, STEP, USER, Rig, Setting, chat, play, played, text

TOOL = {"name": "f", "description": "Does it.", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "f"}
CALL = """<tool_call>
{"name": "f", "arguments": {"input": "a long input for some time"}}
</tool_call>"""
THOUGHTS = f"<think>{'Hm. ' * 10}</think>Yes."
HERMES = choose_dialect("", "hermes", "think")
HIDDEN = {"type": "adaptive", "display": "omitted"}
PACE = Pace(hold=1, ping=2, stall=60)
WIDEST_GAP = 2 * PACE.ping  # a ping comes when a whole period was silent


def silent(*texts: str, **fields: Any) -> Setting:
    return Setting(texts=texts, dialect=HERMES, pace=PACE, context=400, **fields)


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        (CHAT, {"messages": USER, "tools": [{"type": "function", "function": TOOL}]}, CALL),
        ("/v1/responses", {"input": "hi", "tools": [CUSTOM]}, CALL),
        (
            "/v1/messages",
            {
                "messages": USER,
                "max_tokens": 99,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            },
            CALL,
        ),
        (
            "/v1/messages",
            {"messages": USER, "max_tokens": 99, "thinking": HIDDEN},
            THOUGHTS,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("headers", [{}, {"x-conversation-id": "held"}])
def test_no_api_is_silent_while_text_is_withheld(
    path: str, body: dict[str, Any], output: str, headers: dict[str, str]
) -> None:
    async def scene(rig: Rig) -> None:
        asked = {"model": MODEL, "stream": True, **body}
        async with rig.client.post(path, asked, headers) as exchange:
            times = [rig.service.clock() async for _ in exchange.chunks()]
        gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
        assert max(gaps) <= WIDEST_GAP
        assert times[-1] > 5 * PACE.ping

    play(scene, silent(output))


@pytest.mark.parametrize("headers", [{}, {"x-conversation-id": "held"}])
@played(Setting(step=3.0, pace=PACE, max_batch_tokens=20, max_batch_size=8))
async def test_a_ping_says_how_far_the_prompt_is(rig: Rig, headers: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "x" * 90}]
    body = chat(stream=True, messages=messages)
    async with rig.client.post(CHAT, body, headers) as exchange:
        pings = [piece async for piece in exchange.chunks() if piece.startswith(b": ")]
    total = len(rig.ended[0].spec.prompt)
    assert pings[:2] == [b": ping\n\n", b": ping, 20 of %d prompt tokens\n\n" % total]
    assert b": ping, 80 of %d prompt tokens\n\n" % total in pings


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@played(Setting(max_batch_tokens=20))
async def test_progress_is_an_event_for_each_part_of_the_prompt(rig: Rig, path: str) -> None:
    fields = {"stream": True, "return_progress": True}
    long = chat(messages=[{"role": "user", "content": "x" * 90}], **fields)
    body = long if path == CHAT else text(prompt="x" * 96, **fields)
    events = (await rig.client.post(path, body)).events
    total = len(rig.ended[0].spec.prompt)
    progress = [event["prompt_progress"] for event in events[:-1] if "prompt_progress" in event]
    assert [each["processed"] for each in progress] == [20, 40, 60, 80]
    assert [each["time_ms"] for each in progress] == [250, 500, 750, 1000]
    assert {(each["total"], each["cache"]) for each in progress} == {(total, 0)}
    assert "prompt_progress" not in events[len(progress)]
    plain = (await rig.client.post(path, body | {"return_progress": False})).events
    assert len(plain) == len(events) - len(progress)


@played(Setting(pace=Pace(whole=0.6)))
async def test_spaces_come_before_a_body_that_is_late(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat()) as exchange:
        writes = [(rig.service.clock(), piece) async for piece in exchange.chunks()]
    assert exchange.status == 200
    *spaces, (_, last) = writes
    assert spaces == [(0.6, b" "), (1.2, b" ")]
    body = json.loads(b"".join(piece for _, piece in writes))
    assert body["choices"][0]["message"]["content"] == "Hello!"
    assert last.startswith(b"{")


@played(Setting(texts=("a long story " * 10,), pace=Pace(whole=0.6)))
async def test_an_error_after_spaces_is_a_body_of_a_200_and_one_before_has_its_status(
    rig: Rig,
) -> None:
    exchange = await rig.client.post(CHAT, chat(deadline_ms=3000))
    assert (exchange.status, exchange.json["error"]["code"]) == (200, "deadline_exceeded")
    assert (await rig.client.post(CHAT, chat(messages=[]))).status == 400


@played(Setting(texts=("a long story " * 10,), pace=Pace(whole=0.6)))
async def test_a_client_that_leaves_between_spaces_ends_the_request(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat()) as exchange:
        await exchange.start()
        await asyncio.sleep(STEP)
        exchange.disconnect()
        await exchange.ended()
    await asyncio.sleep(STEP)
    assert [request.abort for request in rig.ended] == [Abort.CLIENT_GONE]
