import asyncio

import aiohttp

from tests.serving.client import Json, streamed_text

PROMPTS = (
    "Hello",
    "What is 12 + 30?",
    "Tell me a story about a fox.",
    "What is Podway? Explain it in a few words, and then explain what an iteration is.",
)


def body(index: int) -> Json:
    return {
        "prompt": PROMPTS[index % len(PROMPTS)] * (1 + index % 5),
        "max_tokens": 10 + index * 3 % 60,
        "temperature": index // len(PROMPTS) % 2,
        "seed": index,
        "ignore_eos": True,
    }


async def test_32_concurrent_streams_have_the_texts_of_single_runs(server_url: str) -> None:
    bodies = [body(index) for index in range(32)]
    async with aiohttp.ClientSession() as session:
        alone = [await streamed_text(session, server_url, each) for each in bodies]
        together = await asyncio.gather(
            *(streamed_text(session, server_url, each) for each in bodies)
        )
    assert together == alone
    assert len(set(alone)) > 4
