"""A real server whose workers are killed: it reports unavailable, and then serves again."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import psutil

from tests.conftest import Server, read_url, start_server
from tests.serving.client import Json, streamed_text, with_stream

SHORT: Json = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def worker_of(server: Server) -> int:
    """The process id of the one worker."""
    (worker,) = psutil.Process(server.pid).children()
    return worker.pid


async def until_ready(session: aiohttp.ClientSession, url: str, status: int) -> Mapping[str, str]:
    """Ask until `/ready` answers with `status`; the headers that came with it."""
    while True:
        async with session.get(f"{url}/ready") as response:
            if response.status == status:
                return response.headers


async def test_a_worker_that_dies_while_idle_is_replaced_before_the_next_request(
    tmp_path: Path,
) -> None:
    with start_server(tmp_path, "--max-restarts", "1") as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            before = await streamed_text(session, url, SHORT)
            os.kill(worker_of(server), signal.SIGKILL)
            headers = await until_ready(session, url, 503)
            assert int(headers["retry-after"]) >= 1
            await until_ready(session, url, 200)
            assert await streamed_text(session, url, SHORT) == before
            os.kill(worker_of(server), signal.SIGKILL)
            while "retry-after" in await until_ready(session, url, 503):
                pass  # its end has not been reaped yet
            body = with_stream(SHORT, stream=False)
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 503
                assert "restarted 1 times" in (await response.json())["error"]["message"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
