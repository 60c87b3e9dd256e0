"""A real server of a chat model and an embedder, which are loaded and unloaded."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import Server, read_url, start_server
from tests.serving.client import Json, pause, streamed_text, whole

TABLES = """
memory = "1GiB"
threads = 1

[models.chat]
model = "builtin"
served_model_name = "gpt"
disk_kv = "kv"

[models.embedder]
model = "builtin"
task = "embed"
"""
STORY = "Once upon a time there was a small dog who lived near the sea, and every morning it ran"
BODY: Json = {"model": "chat", "prompt": STORY, "max_tokens": 200, "temperature": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    config = tmp_path / "models.toml"
    config.write_text(TABLES)
    with start_server(tmp_path, "--config", str(config)) as server:
        yield server


async def statuses(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(f"{url}/v1/models") as response:
        models = (await response.json())["data"]
    return {model["id"]: model["status"]["value"] for model in models}


async def test_a_chat_model_and_an_embedder_share_a_server(server: Server) -> None:
    url, process = read_url(server), psutil.Process(server.pid)
    async with aiohttp.ClientSession() as session:
        assert set((await statuses(session, url)).values()) == {"unloaded"}
        assert process.children() == []
        embedding = {"model": "embedder", "input": "a cat"}
        text, vectors = await asyncio.gather(
            streamed_text(session, url, {**BODY, "ignore_eos": True}),
            embed(session, url, embedding),
        )
        assert len(vectors) > 8
        assert await statuses(session, url) == dict.fromkeys(("chat", "gpt", "embedder"), "loaded")

        again = asyncio.create_task(streamed_text(session, url, {**BODY, "ignore_eos": True}))
        while not await is_busy(session, url):
            await pause()
        async with session.post(f"{url}/models/unload", json={"model": "chat"}) as response:
            assert response.status == 200
        assert await again == text  # whole, although its model was being unloaded
        while (await statuses(session, url))["chat"] != "unloaded":
            await pause()
        assert len(process.children()) == 1
        assert await embed(session, url, embedding) == vectors
        loaded_again = await whole(session, url, "/v1/completions", {**BODY, "max_tokens": 4})
        assert loaded_again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


async def embed(session: aiohttp.ClientSession, url: str, body: Json) -> list[float]:
    async with session.post(f"{url}/v1/embeddings", json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    vector: list[float] = answer["data"][0]["embedding"]
    return vector


async def is_busy(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/v1/loads") as response:
        aggregate = (await response.json())["aggregate"]
    return bool(aggregate["total_running_reqs"])
