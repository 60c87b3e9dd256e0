from pathlib import Path

import aiohttp

from tests.conftest import read_url, start_server
from tests.serving.client import Json, metrics, whole

QUESTIONS = ("Hello! What is Podway, and what is an iteration?", "And what is 2 + 3?")


async def two_turns(session: aiohttp.ClientSession, url: str) -> list[Json]:
    """Both replies of a conversation whose prefix no other test shares."""
    messages: list[Json] = []
    replies: list[Json] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": 60, "temperature": 0, "cache_salt": "turns"}
        replies.append(await whole(session, url, "/v1/chat/completions", body))
        messages.append(replies[-1]["choices"][0]["message"])
    return replies


def texts(replies: list[Json]) -> list[str]:
    return [reply["choices"][0]["message"]["content"] for reply in replies]


def cached(replies: list[Json]) -> list[int]:
    return [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]


async def test_a_second_turn_reuses_the_first_without_changing_the_text(
    server_url: str, tmp_path: Path
) -> None:
    async with aiohttp.ClientSession() as session:
        replies = await two_turns(session, server_url)
        assert (await metrics(session, server_url))["podway_prefix_tokens_total/result=hit"] > 0
        with start_server(tmp_path, "--no-prefix-cache") as plain:
            without = await two_turns(session, url := read_url(plain))
            assert (await metrics(session, url))["podway_prefix_tokens_total/result=hit"] == 0
    first, second = cached(replies)
    assert first == 0
    assert second >= replies[0]["usage"]["prompt_tokens"] // 16 * 16 > 0
    assert cached(without) == [0, 0]
    assert texts(replies) == texts(without)
