"""A whole server that speculates: while drafts are in flight, its worker is killed, or clients
disconnect. The texts are those without speculation, and all KV blocks are free afterwards."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import aiohttp
import httpx
import psutil
import pytest

from tests.conftest import Server, read_url, start_server
from tests.serving.client import Json, metrics, raw_post, streamed_text, until_idle, with_stream

LOOPS: Json = {"prompt": "Tom said 1", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total/model_name=builtin"
CANCELLED = "podway_requests_total/outcome=cancelled"
FREED = "podway_cancel_to_free_iterations_count"
FREED_WITHIN_TWO = "podway_cancel_to_free_iterations_bucket/le=2.0"
TIMEOUT = 120


@dataclass(frozen=True)
class Speculating:
    """A server whose greedy texts repeat themselves, so that drafts are accepted."""

    server: Server
    url: str

    def signal_worker(self, number: int) -> None:
        (worker,) = psutil.Process(self.server.pid).children()
        os.kill(worker.pid, number)

    async def stop_worker(
        self, session: aiohttp.ClientSession, reading: asyncio.Task[str], num_running: int
    ) -> bool:
        """Suspend the worker as soon as drafts are accepted while so many requests run; False if
        `reading` ends before, as on a busy machine drafts may seem not worth it for a while."""
        accepted = inf
        while not reading.done():
            counts = await metrics(session, self.url)
            if counts["podway_requests_running"] == num_running:
                if counts[ACCEPTED] > accepted:
                    self.signal_worker(signal.SIGSTOP)
                    after = await metrics(session, self.url)
                    if after["podway_requests_running"] == num_running:
                        return True
                    self.signal_worker(signal.SIGCONT)
                accepted = counts[ACCEPTED]
        return False


@pytest.fixture(name="expected", scope="module")
def _expected(server_url: str) -> str:
    """The text without speculation."""
    body = with_stream(LOOPS, stream=False)
    answer = httpx.post(f"{server_url}/v1/completions", json=body, timeout=120).json()
    return str(answer["choices"][0]["text"])


@pytest.fixture(name="speculating", scope="module")
def _speculating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculating]:
    config = '{"method": "ngram"}'
    # A cost model that was measured beside other tests may see no gain in drafts
    flags = ("--threads", "1", "--lookahead", "1", "--cost-model", "none")
    folder = tmp_path_factory.mktemp("speculating")
    with start_server(folder, *flags, "--speculative-config", config) as server:
        yield Speculating(server, read_url(server))


async def test_a_worker_that_dies_with_drafts_in_flight_changes_no_text(
    expected: str, speculating: Speculating
) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(TIMEOUT):
        is_stopped = False
        while not is_stopped:
            reading = asyncio.create_task(streamed_text(session, speculating.url, LOOPS))
            is_stopped = await speculating.stop_worker(session, reading, 1)
            assert is_stopped or await reading == expected
        speculating.signal_worker(signal.SIGKILL)
        assert await reading == expected
        counts = await metrics(session, speculating.url)
        assert counts["podway_worker_restarts_total"] == 1


async def test_clients_that_disconnect_with_drafts_in_flight_leave_no_kv_blocks(
    expected: str, speculating: Speculating
) -> None:
    url = speculating.url
    async with aiohttp.ClientSession() as session, asyncio.timeout(TIMEOUT):
        is_stopped = False
        while not is_stopped:
            before = await until_idle(session, url)
            staying = asyncio.create_task(streamed_text(session, url, LOOPS))
            leaving = [await raw_post(url, LOOPS | {"stream": True}) for _ in range(2)]
            is_stopped = await speculating.stop_worker(session, staying, 3)
            assert is_stopped or await staying == expected
            for _, writer in leaving:
                writer.transport.abort()
        speculating.signal_worker(signal.SIGCONT)
        assert await staying == expected
        counts = await until_idle(session, url)
        assert counts[CANCELLED] - before.get(CANCELLED, 0) == 2
        within_two, all_freed = (
            counts[name] - before.get(name, 0) for name in (FREED_WITHIN_TWO, FREED)
        )
        assert within_two == all_freed == 2
        assert counts["podway_kv_slots/state=held/tier=device"] == 0
        assert counts["podway_orphan_blocks"] == 0
