import asyncio
from random import Random

import aiohttp

from tests.serving.client import (
    Json,
    pause,
    raw_post,
    streamed_text,
    until_idle,
)

PATH = "path=/v1/completions"
LONG: Json = {"prompt": "Tell me a story.", "max_tokens": 4000, "ignore_eos": True}


async def test_a_hundred_clients_disconnect_at_random_times(server_url: str) -> None:
    """50 streams and 50 plain requests, cut after 0 to 1.5 seconds."""
    random = Random(5)
    async with aiohttp.ClientSession() as session:
        before = await until_idle(session, server_url)

        async def leave(is_stream: bool, seconds: float) -> None:
            _, writer = await raw_post(server_url, LONG | {"stream": is_stream})
            await asyncio.sleep(seconds)
            writer.transport.abort()

        async with asyncio.TaskGroup() as group:
            for index in range(100):
                group.create_task(leave(index % 2 == 0, random.uniform(0.0, 1.5)))

        def num_answers(found: dict[str, float]) -> float:
            prefix = "podway_http_requests_total/"
            return sum(found[name] for name in found if name.startswith(prefix) and PATH in name)

        expected = num_answers(before) + 100
        async with asyncio.timeout(60):  # a request is counted after it has left the engine
            while num_answers(after := await until_idle(session, server_url)) < expected:
                await pause()
        assert num_answers(after) == expected
        cancelled = "podway_requests_total/outcome=cancelled"
        in_the_engine = after[cancelled] - before.get(cancelled, 0)
        assert 0 < in_the_engine <= 100  # others may still wait for the loop's time
        within_one = "podway_cancel_to_free_iterations_bucket/le=1.0"
        assert after[within_one] == after["podway_cancel_to_free_iterations_count"]
        assert after["podway_orphan_blocks"] == 0
        assert after["podway_kv_slots/state=held/tier=device"] == 0
        assert await streamed_text(session, server_url, {"prompt": "Hello", "max_tokens": 4})
