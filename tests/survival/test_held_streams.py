import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.conftest import Server, read_url, start_server

FLAGS = ("--store", "held.sqlite")
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


ASKED: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
    ("/v1/chat/completions", CHAT, NAMED),
    ("/v1/responses", RESPONSE, {}),
)


async def test_the_events_are_the_same_after_the_worker_and_the_server_were_killed(
    tmp_path: Path,
) -> None:
    async with aiohttp.ClientSession() as session:
        with start_server(tmp_path, *FLAGS) as server:
            url = await asyncio.to_thread(read_url, server)
            streams = [
                await session.post(
                    f"{url}{path}", json={"model": "builtin", **SAMPLED, **body}, headers=headers
                )
                for path, body, headers in ASKED
            ]
            before = [await events(each, BEFORE_WORKER) for each in streams]
            kill_worker(server)
            chat, response = [
                seen + await events(each, BEFORE_SERVER)
                for seen, each in zip(before, streams, strict=True)
            ]
            server.kill()
        last = BEFORE_WORKER + BEFORE_SERVER - 1
        with start_server(tmp_path, *FLAGS) as server:
            url = await asyncio.to_thread(read_url, server)
            place = f"{url}/v1/stream/talk"
            whole = await read(session, place)
            assert whole.startswith(chat)
            assert chat + await read(session, place, **{"last-event-id": str(last)}) == whole
            assert whole.endswith(b"data: [DONE]\n\n")
            response_id = response.split(b'"id":"')[1].split(b'"')[0].decode()
            place = f"{url}/v1/responses/{response_id}?stream=true"
            whole = await read(session, place)
            assert whole.startswith(response)
            assert response + await read(session, f"{place}&starting_after={last}") == whole
            assert b'"status":"incomplete"' in whole[-3000:]
