import asyncio
from random import Random

import aiohttp

from tests.serving.client import (
    Json,
    metrics,
    pause,
    raw_post,
    stream,
    streamed_text,
    until_idle,
    whole,
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


async def test_a_client_that_reads_a_byte_per_second_delays_no_other(server_url: str) -> None:
    async with aiohttp.ClientSession() as session:
        reader, writer = await raw_post(server_url, LONG | {"stream": True})
        assert await reader.read(1)
        texts = await asyncio.gather(
            *(
                streamed_text(session, server_url, LONG | {"max_tokens": 100, "seed": seed})
                for seed in range(8)
            )
        )
        assert all(texts)
        assert await reader.read(1), "the slow reader was cut off"
        writer.transport.abort()
        assert (await until_idle(session, server_url))["podway_orphan_blocks"] == 0


async def test_a_long_prompt_does_not_stop_other_streams(server_url: str) -> None:
    async with aiohttp.ClientSession() as session:
        order: list[str] = []
        is_streaming = asyncio.Event()

        async def short() -> None:
            async for _ in stream(session, server_url, LONG | {"max_tokens": 400}):
                order.append("short")
                is_streaming.set()

        async def long() -> None:
            await is_streaming.wait()
            order.append("long arrives")
            body: Json = {"prompt": [17] * 8_000, "max_tokens": 1}
            await whole(session, server_url, "/v1/completions", body)
            order.append("long answered")

        await asyncio.gather(short(), long())
        during = order[order.index("long arrives") : order.index("long answered")]
        assert during.count("short") >= 5
        counts = await metrics(session, server_url)
        assert counts["podway_loop_lag_seconds_count"] > 0
