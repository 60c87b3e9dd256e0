import asyncio
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from rich.console import Console

import adapters
from gateway.commands import top
from tests.conftest import Server, read_url, start_server
from tests.models.encoders import make_encoder
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

[models.reranker]
model = "reranker"
"""
STORY = "Once upon a time there was a small dog who lived near the sea, and every morning it ran"
BODY: Json = {"model": "chat", "prompt": STORY, "max_tokens": 200, "temperature": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    config = tmp_path / "models.toml"
    config.write_text(TABLES)
    make_reranker(tmp_path / "reranker")
    with start_server(tmp_path, "--config", str(config)) as server:
        yield server


def make_reranker(directory: Path) -> None:
    """A random cross-encoder that reads the built-in model's tokens."""
    sizes = {"vocab_size": 2048, "max_position_embeddings": 128, "num_labels": 1}
    make_encoder("bert", "ForSequenceClassification", **sizes).save_pretrained(directory)
    builtin = Path(adapters.__path__[0]) / "builtin"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin / name, directory)


async def statuses(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    async with session.get(f"{url}/v1/models") as response:
        models = (await response.json())["data"]
    return {model["id"]: model["status"]["value"] for model in models}


async def test_a_chat_model_an_embedder_and_a_reranker_share_a_server(server: Server) -> None:
    url, process = read_url(server), psutil.Process(server.pid)
    async with aiohttp.ClientSession() as session:
        assert set((await statuses(session, url)).values()) == {"unloaded"}
        assert process.children() == []
        assert await shown_by_top(url) == ["not loaded: chat, embedder, reranker"]
        embedding = {"model": "embedder", "input": "a cat"}
        text, vectors, order = await asyncio.gather(
            streamed_text(session, url, {**BODY, "ignore_eos": True}),
            embed(session, url, embedding),
            rerank(session, url),
        )
        assert len(vectors) > 8
        assert sorted(order) == [0, 1, 2]
        models = ("chat", "embedder", "reranker")
        assert await shown_by_top(url) == [f"{name}: policy fcfs" for name in models]
        names = ("chat", "gpt", "embedder", "reranker")
        assert await statuses(session, url) == dict.fromkeys(names, "loaded")

        again = asyncio.create_task(streamed_text(session, url, {**BODY, "ignore_eos": True}))
        while not await is_busy(session, url):
            await pause()
        async with session.post(f"{url}/models/unload", json={"model": "chat"}) as response:
            assert response.status == 200
        assert await again == text  # whole, although its model was being unloaded
        while (await statuses(session, url))["chat"] != "unloaded":
            await pause()
        assert len(process.children()) == 2
        assert await embed(session, url, embedding) == vectors
        assert await rerank(session, url) == order
        loaded_again = await whole(session, url, "/v1/completions", {**BODY, "max_tokens": 4})
        assert loaded_again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


async def shown_by_top(url: str) -> list[str]:
    """The lines of `podway top` that begin with a model, up to its policy, or name other models."""
    text = io.StringIO()
    await top._watch(url, None, Console(file=text, width=120), is_once=True)
    lines = text.getvalue().splitlines()
    return [line.partition(", adm")[0] for line in lines if ": policy" in line or "not " in line]


async def embed(session: aiohttp.ClientSession, url: str, body: Json) -> list[float]:
    async with session.post(f"{url}/v1/embeddings", json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    vector: list[float] = answer["data"][0]["embedding"]
    return vector


async def rerank(session: aiohttp.ClientSession, url: str) -> list[int]:
    """The documents in the reranker's order, which is that of the scores."""
    texts = ["a dog by the sea", "a king", "three small boats that never came home"]
    body: Json = {"model": "reranker", "query": "who lived near the sea?", "documents": texts}
    async with session.post(f"{url}/v1/rerank", json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    pairs = {"model": "reranker", "text_1": body["query"], "text_2": texts}
    async with session.post(f"{url}/v1/score", json=pairs) as response:
        scores = [row["score"] for row in (await response.json())["data"]]
    order: list[int] = [row["index"] for row in answer["results"]]
    assert order == sorted(range(3), key=scores.__getitem__, reverse=True)
    return order


async def is_busy(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/v1/loads") as response:
        aggregate = (await response.json())["aggregate"]
    return bool(aggregate["total_running_reqs"])
