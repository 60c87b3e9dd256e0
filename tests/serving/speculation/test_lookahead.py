import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import aiohttp
import pytest

from tests.conftest import read_url, start_server
from tests.serving.client import Json, metrics, raw_post, streamed_text, until_idle

PROMPTS = ("Hello", "What is 12 + 30?", "Tell me a story about a fox.", "What is an iteration?")
WAYS: tuple[Json, ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 4},
    {"temperature": 0, "presence_penalty": 1.1, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2},
    {"temperature": 0, "stop": ["the", "is "]},
    {"temperature": 0.7, "seed": 6, "min_tokens": 30},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1, "seed": 8, "guided_regex": "[a-z ]{5,30}", "ignore_eos": True},
)


class Servers(NamedTuple):
    """The addresses of a server without lookahead, and of one with it."""

    plain: str
    ahead: str


@pytest.fixture(name="servers")
async def _servers(server_url: str, tmp_path: Path) -> AsyncIterator[Servers]:
    with start_server(tmp_path, "--lookahead", "1") as server:
        yield Servers(server_url, read_url(server))


async def test_lookahead_changes_no_text_and_is_late_by_no_more_than_an_iteration(
    servers: Servers,
) -> None:
    bodies = [
        {"prompt": prompt, "max_tokens": 40 + at} | way
        for at, prompt in enumerate(PROMPTS)
        for way in WAYS
    ]
    async with aiohttp.ClientSession() as session:
        plain, ahead = [
            await asyncio.gather(*(streamed_text(session, url, body) for body in bodies))
            for url in servers
        ]
        assert ahead == plain
        assert len(set(plain)) > len(WAYS)
        random = Random(7)

        async def leave(number: int) -> None:
            """At any time; of the streams, those with odd numbers when they have got tokens."""
            body = {"prompt": "Tell me a story.", "max_tokens": 4000, "ignore_eos": True}
            reader, writer = await raw_post(servers.ahead, body | {"stream": number % 3 > 0})
            if number % 2 and number % 3:
                assert b"200" in await reader.readline()
            await asyncio.sleep(random.uniform(0.0, 0.5))
            writer.transport.abort()

        await until_idle(session, servers.ahead)
        await asyncio.gather(*map(leave, range(80)))
        counts = await until_idle(session, servers.ahead)
        assert counts["podway_requests_total/outcome=cancelled"] >= 40, "half of them at least"
        within_two = counts["podway_cancel_to_free_iterations_bucket/le=2.0"]
        assert within_two == counts["podway_cancel_to_free_iterations_count"]
        assert counts["podway_orphan_blocks"] == 0
        assert counts["podway_kv_slots/state=held/tier=device"] == 0
        assert (await metrics(session, servers.ahead))["podway_requests_total/outcome=failed"] == 0
