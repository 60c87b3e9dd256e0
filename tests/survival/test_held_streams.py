"""Held streams go on with the same events after `kill -9` of the worker and of the server."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.conftest import Server, read_url, start_server

FLAGS = ("--cost-model", "none", "--store", "held.sqlite")
NAMED = {"x-conversation-id": "talk"}
LENGTH, BEFORE_WORKER, BEFORE_SERVER = 400, 40, 120  # events
SAMPLED = {"ignore_eos": True, "temperature": 0.9, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": LENGTH}
RESPONSE = {"input": "Tell me a story.", "max_output_tokens": LENGTH, "background": True}


async def events(response: aiohttp.ClientResponse, count: int) -> bytes:
    """The next events, without pings."""
    lines = []
    while count:
        line = await response.content.readline()
        lines.append(line)
        count -= line == b"\n"
    return b"".join(lines)


def kill_worker(server: Server) -> None:
    (worker,) = psutil.Process(server.pid).children()
    os.kill(worker.pid, signal.SIGKILL)


async def read(session: aiohttp.ClientSession, url: str, **headers: str) -> bytes:
    async with session.get(url, headers=headers) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [("/v1/chat/completions", CHAT, NAMED), ("/v1/responses", RESPONSE, {})],
)
async def test_the_events_are_the_same_after_the_worker_and_the_server_were_killed(
    path: str, body: dict[str, Any], headers: dict[str, str], tmp_path: Path
) -> None:
    asked = {"model": "builtin", **SAMPLED, **body}
    async with aiohttp.ClientSession() as session:
        with start_server(tmp_path, *FLAGS) as server:
            url = await asyncio.to_thread(read_url, server)
            async with session.post(f"{url}{path}", json=asked, headers=headers) as response:
                assert response.status == 200
                seen = await events(response, BEFORE_WORKER)
                kill_worker(server)
                seen += await events(response, BEFORE_SERVER)
                server.kill()
        place = "/v1/stream/talk"
        if path == "/v1/responses":
            response_id = seen.split(b'"id":"')[1].split(b'"')[0].decode()
            place = f"/v1/responses/{response_id}?stream=true"
        with start_server(tmp_path, *FLAGS) as server:
            url = await asyncio.to_thread(read_url, server)
            whole = await read(session, f"{url}{place}")
            assert whole.startswith(seen)
            last = BEFORE_WORKER + BEFORE_SERVER - 1
            if path == "/v1/responses":
                assert seen + await read(session, f"{url}{place}&starting_after={last}") == whole
                assert b'"status":"incomplete"' in whole[-3000:]
            else:
                rest = await read(session, f"{url}{place}", **{"last-event-id": str(last)})
                assert seen + rest == whole
                assert whole.endswith(b"data: [DONE]\n\n")
