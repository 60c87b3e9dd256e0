import asyncio
import json
import os
import signal
from importlib.resources import files
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import Server, read_url, start_server
from tests.models.builtin_loras import builtin_lora
from tests.serving.client import Json, pause, streamed_text

NAMES = ("builtin", "one", "two")
BUILTIN = str(files("adapters").joinpath("builtin"))
PROMPT = "Once upon a time there was a small dog who lived near the sea, and every morning it"


def body(model: str, prompt: str = PROMPT) -> Json:
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return {"model": model, "prompt": prompt, **fields}


async def post(session: aiohttp.ClientSession, url: str, fields: Json) -> tuple[int, str]:
    async with session.post(url, json=fields) as response:
        return response.status, await response.text()


async def load(session: aiohttp.ClientSession, url: str, name: str, path: Path) -> None:
    fields = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    status, text = await post(session, f"{url}/v1/load_lora_adapter", fields)
    assert status == 200, text


async def kill_worker(session: aiohttp.ClientSession, url: str, server: Server) -> None:
    """Kill the worker and wait for the next one."""
    (worker,) = psutil.Process(server.pid).children()
    os.kill(worker.pid, signal.SIGKILL)
    for wanted in (503, 200):
        status = 0
        while status != wanted:
            async with session.get(f"{url}/ready") as response:
                status = response.status
            await pause()


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
async def test_texts_are_the_same_alone_and_mixed_with_other_adapters(
    tmp_path: Path, method: str
) -> None:
    config = {"method": method} | ({"model": BUILTIN} if method == "draft_model" else {})
    speculation = ("--speculative-config", json.dumps(config))
    one, two = (builtin_lora(tmp_path / name, i) for i, name in enumerate(NAMES[1:]))
    with start_server(tmp_path, "--lora", f"one={one}", *speculation) as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            await load(session, url, "two", two)
            alone = {name: await streamed_text(session, url, body(name)) for name in NAMES}
            assert len(set(alone.values())) == 3
            names = NAMES * 4
            texts = await asyncio.gather(
                *(streamed_text(session, url, body(name)) for name in names)
            )
            assert texts == [alone[name] for name in names]


async def test_a_reload_never_serves_what_other_bytes_computed(tmp_path: Path) -> None:
    path = builtin_lora(tmp_path / "one", 1)
    flags = ("--disk-kv", str(tmp_path / "kv"), "--host-kv-memory", "64MiB")
    with start_server(tmp_path, "--lora", f"one={path}", *flags) as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            first = await streamed_text(session, url, body("one"))
            await load(session, url, "one", builtin_lora(path, 2))
            second = await streamed_text(session, url, body("one"))
            assert second != first
            status, _ = await post(session, f"{url}/v1/unload_lora_adapter", {"lora_name": "one"})
            assert status == 200
            assert (await post(session, f"{url}/v1/completions", body("one")))[0] == 404
            await load(session, url, "one", builtin_lora(path, 1))
            assert await streamed_text(session, url, body("one")) == first


async def test_a_restarted_worker_has_the_adapters_whose_files_are_unchanged(
    tmp_path: Path,
) -> None:
    one, two = (builtin_lora(tmp_path / name, i) for i, name in enumerate(NAMES[1:]))
    with start_server(tmp_path, "--lora", f"one={one},two={two}") as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            before = await streamed_text(session, url, body("one"))
            await kill_worker(session, url, server)
            assert await streamed_text(session, url, body("one")) == before
            builtin_lora(two, 7)
            await kill_worker(session, url, server)
            assert await streamed_text(session, url, body("one")) == before
            status, text = await post(session, f"{url}/v1/completions", body("two"))
            assert (status, "does not exist" in text) == (404, True)
            await load(session, url, "two", two)
            assert (await post(session, f"{url}/v1/completions", body("two")))[0] == 200
