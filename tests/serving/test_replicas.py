import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import Server, read_url, start_server
from tests.serving.client import Json, streamed_text, until_idle

STORIES = ("Once upon a time there was a small dog who", "The king of the far country had")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with start_server(tmp_path, "--replicas", "2", "--threads", "1") as server:
        yield server


def a_body(prompt: str, max_tokens: int) -> Json:
    fields = {"model": "builtin", "prompt": prompt}
    return fields | {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def running(session: aiohttp.ClientSession, url: str) -> list[int]:
    """The running requests of each replica."""
    async with session.get(f"{url}/v1/loads") as response:
        return [load["num_running_reqs"] for load in (await response.json())["loads"]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each replica needs a core")
async def test_two_replicas_serve_as_one_and_outlive_the_death_of_one(server: Server) -> None:
    url = read_url(server)
    workers = psutil.Process(server.pid).children()
    cores = [set(worker.cpu_affinity()) for worker in workers]
    assert len(cores) == 2
    assert not cores[0] & cores[1]
    async with aiohttp.ClientSession() as session:
        bodies = [a_body(story, 2000) for story in STORIES]
        async with session.post(f"{url}/admin/policy", json={"policy": "fair"}) as response:
            assert (await response.json())["policy"] == "fair"

        streams = [asyncio.create_task(streamed_text(session, url, body)) for body in bodies]
        while await running(session, url) != [1, 1]:  # neither has the prefix of a prompt
            assert not any(stream.done() for stream in streams), "both replicas compute"
        os.kill(workers[0].pid, signal.SIGKILL)
        texts = await asyncio.gather(*streams)
        assert [await streamed_text(session, url, body) for body in bodies] == texts

        async with session.post(f"{url}/v1/completions", json=a_body(STORIES[0], 4)) as response:
            request_id = response.headers["x-request-id"]
        counts = await until_idle(session, url)
        assert counts["podway_worker_restarts_total"] == 1
        assert counts["podway_requests_total/outcome=finished"] == 5
        assert counts["podway_output_tokens_total"] >= 4 * 2000
        assert counts["podway_orphan_blocks"] == 0
        async with session.get(f"{url}/v1/requests/{request_id}/timeline") as response:
            assert "It did not wait" in (await response.json())["explanation"]
