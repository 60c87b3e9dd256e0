"""Events that are written without waking a task: the same bytes in the same order."""

import asyncio
from typing import Any

import pytest

from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, play, text
from tests.wire.asgi import Exchange

NUMBER = b"id: "


async def streamed(rig: Rig, path: str, body: dict[str, Any], *, only_sends: bool) -> bytes:
    exchange = rig.client.post(path, body)
    if only_sends:
        exchange.only_sends()
    return (await exchange).content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(stream=True)),
        (TEXT, text(stream=True)),
        (TEXT, text(stream=True, n=3)),
        (TEXT, text(stream=True, stop=["o"])),
        (TEXT, text(stream=True, logprobs=1)),
        (TEXT, text(stream=True, stream_options={"include_usage": True})),
    ],
)
def test_the_bytes_are_those_that_a_task_sends(path: str, body: dict[str, Any]) -> None:
    found: list[bytes] = []
    for only_sends in (False, True):

        async def scene(rig: Rig, only_sends: bool = only_sends) -> None:
            found.append(await streamed(rig, path, body, only_sends=only_sends))

        play(scene, Setting())
    direct, sent = found
    assert direct == sent
    assert direct.count(NUMBER) > 3


def test_plain_text_is_written_without_waking_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = Exchange.write

    def noted(exchange: Exchange, body: bytes) -> None:
        written.append(body.removesuffix(b"\n\n"))
        write(exchange, body)

    monkeypatch.setattr(Exchange, "write", noted)

    async def scene(rig: Rig) -> None:
        body = await streamed(rig, TEXT, text(stream=True), only_sends=False)
        first, *others, finish, done, rest = body.split(b"\n\n")
        assert written == others
        assert first.startswith(NUMBER)
        assert b'"finish_reason":"stop"' in finish
        assert (done.partition(b"data: ")[2], rest) == (b"[DONE]", b"")

    play(scene, Setting())


def test_events_stay_in_order_while_a_client_reads_in_bursts() -> None:
    async def scene(rig: Rig) -> None:
        numbers: list[int] = []
        async with rig.client.post(TEXT, text(stream=True)) as exchange:
            async for piece in exchange.chunks():
                lines = [line for line in piece.split(b"\n") if line.startswith(NUMBER)]
                numbers += [int(line.removeprefix(NUMBER)) for line in lines]
                exchange.pause()
                await asyncio.sleep(1.3 * STEP)
                exchange.resume()
        assert numbers == list(range(len(numbers)))

    play(scene, Setting())
