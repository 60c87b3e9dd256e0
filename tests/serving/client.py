"""A small client for tests that disconnect, read slowly, and read the server's metrics.

Responses are checked against OpenAI's description (`tests.wire.openai_shapes`).
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.wire.openai_shapes import chunk_complaints, whole_complaints

Json = dict[str, Any]
PAUSE = 0.02  # seconds between two polls


def with_stream(body: Json, *, stream: bool) -> Json:
    """The body as the built-in model's server wants it."""
    return {"model": "builtin", **body, "stream": stream}


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Every sample of `/metrics`, summed over labels it has besides `state` and `outcome`."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items())]
            samples["/".join([sample.name, *labels])] = sample.value
    return samples


async def pause() -> None:
    """Wait between two polls, which take CPU seconds of both ends."""
    await asyncio.sleep(PAUSE)


async def until_idle(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Poll until no request runs or waits; returns the metrics of that moment."""
    while True:
        counts = await metrics(session, url)
        if not counts["podway_requests_running"] and not counts["podway_requests_waiting"]:
            return counts
        await pause()


async def stream(
    session: aiohttp.ClientSession, url: str, body: Json, path: str = "/v1/completions"
) -> AsyncIterator[Json]:
    """The chunks of a streamed answer."""
    async with session.post(f"{url}{path}", json=with_stream(body, stream=True)) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                assert chunk_complaints("POST", path, chunk) == []
                yield chunk


async def whole(session: aiohttp.ClientSession, url: str, path: str, body: Json) -> Json:
    """An answer that is not streamed."""
    async with session.post(f"{url}{path}", json=with_stream(body, stream=False)) as response:
        assert response.status == 200, await response.text()
        answer: Json = await response.json()
    assert whole_complaints("POST", path, 200, answer) == []
    return answer


async def streamed_text(session: aiohttp.ClientSession, url: str, body: Json) -> str:
    """The whole text of a streamed completion."""
    parts = [
        choice["text"] async for chunk in stream(session, url, body) for choice in chunk["choices"]
    ]
    return "".join(parts)


async def raw_post(url: str, body: Json) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a socket of its own, whose reading is up to the caller."""
    split = urlsplit(url)
    data = json.dumps(with_stream(body, stream=body.get("stream", False))).encode()
    reader, writer = await asyncio.open_connection(split.hostname, split.port, limit=1 << 10)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {split.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer
