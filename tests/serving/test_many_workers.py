"""A real server of four worker processes says what a server of one says, also after a death."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import psutil

from tests.conftest import read_url, start_server
from tests.serving.client import Json, stream, streamed_text

PROMPTS: list[Json] = [
    {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    {"prompt": "What is 2 + 3?", "max_tokens": 25, "temperature": 0.8, "seed": 7},
    {"prompt": "Tell me a story about a fox", "max_tokens": 60, "temperature": 0},
    {"prompt": "one two three " * 20, "max_tokens": 30, "temperature": 1.0, "seed": 1},
]


async def texts_of(session: aiohttp.ClientSession, url: str) -> list[str]:
    return await asyncio.gather(*(streamed_text(session, url, one) for one in PROMPTS))


async def test_two_stages_of_two_ranks_say_what_one_worker_says(
    server_url: str, tmp_path: Path
) -> None:
    flags = (
        "--pipeline-stages",
        "2",
        "--tensor-ranks",
        "2",
        "--cost-model",
        "none",
        "--lookahead",
        "1",
    )
    with start_server(tmp_path, *flags) as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            expected = await texts_of(session, server_url)
            assert await texts_of(session, url) == expected
            workers = psutil.Process(server.pid).children()
            assert len(workers) == 4
            pieces: list[str] = []
            async for chunk in stream(session, url, PROMPTS[0]):
                if not pieces:
                    os.kill(workers[1].pid, signal.SIGKILL)
                pieces += [choice["text"] for choice in chunk["choices"]]
            assert "".join(pieces) == expected[0]
            assert not any(worker.is_running() for worker in workers)
            workers = psutil.Process(server.pid).children()
            assert len(workers) == 4
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert not any(worker.is_running() for worker in workers)
