import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from gateway.groups.terms import ServerTerms
from tests.gateway.groups.rig import Fleet, Model, play, play_until_killed
from tests.gateway.rig import CHAT, STEP, USER, Setting

TEXTS = {"a": "The first model tells this story.", "b": "The second one tells another story."}
MODELS = tuple(
    Model(name, setting=Setting(texts=(text,) * 9), load_seconds=1.0)
    for name, text in TEXTS.items()
)
ONE_FITS = ServerTerms(memory=1)


async def begin(fleet: Fleet, name: str, num_chunks: int) -> bytes:
    """Begin the held stream of a model, read so many chunks of it, and leave."""
    body = {"model": name, "messages": USER, "stream": True}
    pieces: list[bytes] = []
    async with fleet.client.post(CHAT, body, {"x-conversation-id": name}) as exchange:
        assert await exchange.start() == 200
        async for piece in exchange.chunks():
            pieces.append(piece)
            if len(pieces) == num_chunks:
                exchange.disconnect()
                break
        await exchange.ended()
    return b"".join(pieces)


async def again(fleet: Fleet, name: str) -> bytes:
    """All events of the stream, once its model is loaded for it."""
    while True:
        exchange = await fleet.client.get(f"/v1/stream/{name}")
        if exchange.status == 200:
            return exchange.content
        assert exchange.status == 503
        assert float(exchange.headers["retry-after"]) >= 1
        await asyncio.sleep(STEP)


@pytest.mark.parametrize("terms", [ServerTerms(memory=2), ONE_FITS])
def test_each_stream_goes_on_with_its_own_model(terms: ServerTerms, tmp_path: Path) -> None:
    seen: dict[str, bytes] = {}

    async def killed(fleet: Fleet) -> None:
        for name in TEXTS:
            seen[name] = await begin(fleet, name, 3)

    async def restored(fleet: Fleet) -> None:
        for name in TEXTS:
            whole = await again(fleet, name)
            assert whole.startswith(seen[name])
            said = b"".join(whole.split(b'"content":"')[1:])
            assert b'"finish_reason":"stop"' in said
            assert f'"model":"{name}"'.encode() in whole

    play_until_killed(killed, *MODELS, terms=ServerTerms(memory=2), store=tmp_path / "store")
    fleet = play(restored, *MODELS, terms=terms, store=tmp_path / "store")
    assert sorted(fleet.loads) == ["a", "b"]


def test_the_stream_of_a_model_that_is_gone_keeps_no_other_from_going_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[str, Any] = {}

    async def killed(fleet: Fleet) -> None:
        for name in TEXTS:
            seen[name] = await begin(fleet, name, 3)

    async def restored(fleet: Fleet) -> None:
        assert (await again(fleet, "b")).startswith(seen["b"])
        assert (await fleet.client.get("/v1/stream/a")).status == 404

    play_until_killed(killed, *MODELS, terms=ServerTerms(memory=2), store=tmp_path / "store")
    with caplog.at_level(logging.WARNING):
        play(restored, MODELS[1], Model("c"), terms=ServerTerms(memory=2), store=tmp_path / "store")
    assert "cannot run again" in caplog.text
