import asyncio
from pathlib import Path
from random import Random

import aiohttp

from tests.conftest import read_url, start_server
from tests.serving.client import Json, metrics, raw_post, until_idle

STORY: Json = {"prompt": "Tell me a story.", "max_tokens": 4000, "ignore_eos": True}


async def test_with_lookahead_a_client_that_leaves_frees_its_kv_an_iteration_later_at_most(
    tmp_path: Path,
) -> None:
    random = Random(7)

    async def leave(url: str, number: int) -> None:
        """At any time; of the streams, those with odd numbers when they have got tokens."""
        reader, writer = await raw_post(url, STORY | {"stream": number % 3 > 0})
        if number % 2 and number % 3:
            assert b"200" in await reader.readline()
        await asyncio.sleep(random.uniform(0.0, 1.0))
        writer.transport.abort()

    with start_server(tmp_path, "--lookahead", "1") as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(leave(url, number) for number in range(80)))
            counts = await until_idle(session, url)
            assert counts["podway_requests_total/outcome=cancelled"] >= 40, "half of them at least"
            within_two = counts["podway_cancel_to_free_iterations_bucket/le=2.0"]
            assert within_two == counts["podway_cancel_to_free_iterations_count"]
            assert counts["podway_orphan_blocks"] == 0
            assert counts["podway_kv_slots/state=held/tier=device"] == 0
            assert (await metrics(session, url))["podway_requests_total/outcome=failed"] == 0
