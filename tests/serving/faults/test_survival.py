import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import psutil

from tests.conftest import Server, read_url, start_server
from tests.serving.client import Json, pause, with_stream

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
        await pause()


async def status_of(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as response:
        return response.status


async def test_a_server_without_workers_reports_it_and_then_ends_with_an_error(
    tmp_path: Path,
) -> None:
    with start_server(tmp_path, "--max-restarts", "0") as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            os.kill(worker_of(server), signal.SIGKILL)
            while "retry-after" in await until_ready(session, url, 503):
                pass  # its end has not been reaped yet
            assert await status_of(session, f"{url}/health") == 503
            body = with_stream(SHORT, stream=False)
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 503
                assert "restarts are disabled" in (await response.json())["error"]["message"]
        assert await asyncio.to_thread(server.wait, 60) == 1
        log = server.log.read_text()
        assert "was killed by signal 9, Killed (not by the server" in log
        assert log.splitlines()[-1].startswith("podway: The server has no worker: ")
