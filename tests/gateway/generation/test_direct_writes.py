"""Events that are written without waking a task: the same bytes in the same order."""

import asyncio
from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from tests.gateway.rig import CHAT, MODEL, STEP, TEXT, USER, Rig, Setting, chat, play, text
from tests.wire.asgi import Exchange

NUMBER = b"id: "
CALL = """<think>Hm.</think>Yes.<tool_call>
{"name": "f", "arguments": {"input": "a text"}}
</tool_call>"""
AGENT = Setting(texts=(CALL,), dialect=choose_dialect("", "hermes", "think"), context=400)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
RESPONSE = {"model": MODEL, "stream": True, "input": "hi"}
MESSAGE = {"model": MODEL, "stream": True, "max_tokens": 200, "messages": USER}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
# All but their first and last events are written without waking a task
DIRECT = [
    (TEXT, text(stream=True), Setting()),
    (TEXT, text(stream=True, stop=["lo"]), Setting()),
    (CHAT, chat(stream=True, stream_options=USAGE), AGENT),
    (CHAT, chat(stream=True, tools=CHAT_TOOLS), AGENT),
    ("/v1/responses", {**RESPONSE, "tools": [{"type": "function", **FUNCTION}]}, AGENT),
    ("/v1/messages", {**MESSAGE, "tools": [TOOL]}, AGENT),
]


async def streamed(rig: Rig, path: str, body: dict[str, Any], *, only_sends: bool) -> bytes:
    exchange = rig.client.post(path, body)
    if only_sends:
        exchange.only_sends()
    return (await exchange).content


@pytest.mark.parametrize(
    ("path", "body", "setting"),
    [
        *DIRECT,
        (CHAT, chat(stream=True), Setting()),
        (TEXT, text(stream=True, n=3), Setting()),
        (TEXT, text(stream=True, logprobs=1), Setting()),
        (TEXT, text(stream=True, stream_options={"include_usage": True}), Setting()),
    ],
)
def test_the_bytes_are_those_that_a_task_sends(
    path: str, body: dict[str, Any], setting: Setting
) -> None:
    found: list[bytes] = []
    for only_sends in (False, True):

        async def scene(rig: Rig, only_sends: bool = only_sends) -> None:
            found.append(await streamed(rig, path, body, only_sends=only_sends))

        play(scene, setting)
    direct, sent = found
    assert direct == sent
    assert direct.count(NUMBER) > 3


@pytest.mark.parametrize(("path", "body", "setting"), DIRECT)
def test_events_are_written_without_waking_a_task(
    path: str, body: dict[str, Any], setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    sent: list[bytes] = []
    write, send = Exchange.write, Exchange._send

    def noted_write(exchange: Exchange, body: bytes) -> None:
        written.append(body)
        write(exchange, body)

    async def noted_send(exchange: Exchange, message: Any) -> None:
        sent.append(message.get("body", b""))
        await send(exchange, message)

    monkeypatch.setattr(Exchange, "write", noted_write)
    monkeypatch.setattr(Exchange, "_send", noted_send)

    async def scene(rig: Rig) -> None:
        body_sent = await streamed(rig, path, body, only_sends=False)
        *first, last = sent  # the head, and the first event unless it came after `Pace.hold`
        assert b"".join([*first, *written, last]) == body_sent
        assert len(first) <= 2 <= len(written)

    play(scene, setting)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_events_stay_in_order_while_a_client_reads_in_bursts(num_choices: int) -> None:
    async def scene(rig: Rig) -> None:
        numbers: list[int] = []
        async with rig.client.post(TEXT, text(stream=True, n=num_choices)) as exchange:
            async for piece in exchange.chunks():
                lines = [line for line in piece.split(b"\n") if line.startswith(NUMBER)]
                numbers += [int(line.removeprefix(NUMBER)) for line in lines]
                exchange.pause()
                await asyncio.sleep(1.3 * STEP)
                exchange.resume()
        assert numbers == list(range(len(numbers)))

    play(scene, Setting())
