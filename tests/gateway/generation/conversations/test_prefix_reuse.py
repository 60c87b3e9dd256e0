"""Prefix-cache hits are reported to the client and counted. A block holds one token here."""

from typing import Any

import pytest

from tests.gateway.rig import CHAT, MODEL, TEXT, Rig, Setting, chat, played, text

OFF = Setting(prefix_cache=False)
STREAMED_OR_NOT = pytest.mark.parametrize("stream", [True, False])


async def usage(rig: Rig, path: str, body: dict[str, Any]) -> Any:
    """The usage of an answer, streamed if the body says so."""
    if body.get("stream"):
        body = body | {"stream_options": {"include_usage": True}}
    exchange = await rig.client.post(path, body)
    if not body.get("stream"):
        return exchange.json["usage"]
    *_, last, _ = exchange.events
    return last["usage"]


async def cached(rig: Rig, path: str, body: dict[str, Any]) -> Any:
    return (await usage(rig, path, body))["prompt_tokens_details"]["cached_tokens"]


@STREAMED_OR_NOT
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text(prompt="user:hi\n"))])
@played()
async def test_a_repeated_prompt_is_cached_except_its_last_token(
    rig: Rig, path: str, body: dict[str, Any], stream: bool
) -> None:
    body["stream"] = stream
    assert await cached(rig, path, body) == 0
    assert await usage(rig, path, body) == {
        "prompt_tokens": 8,
        "completion_tokens": 7,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@played()
async def test_a_second_turn_reuses_the_first_turns_output(rig: Rig) -> None:
    assert await cached(rig, TEXT, text(prompt="Q: hi\nA: ")) == 0
    turn = text(prompt="Q: hi\nA: Hello! Q: and now?\nA: ")
    assert await cached(rig, TEXT, turn) == len("Q: hi\nA: Hello!")


@played(OFF)
async def test_without_the_cache_nothing_is_cached(rig: Rig) -> None:
    assert await cached(rig, CHAT, chat()) == 0
    assert await cached(rig, CHAT, chat()) == 0
    assert rig.metrics.num_cached_tokens == 0


@played()
async def test_each_prompt_counts_once_however_many_choices_it_has(rig: Rig) -> None:
    assert await cached(rig, TEXT, text(prompt=["abcd", "xyz"])) == 0
    assert await cached(rig, TEXT, text(prompt=["abcd", "xyz", "new"], n=3)) == 3 + 2


@played()
async def test_only_requests_with_the_same_salt_share_prefixes(rig: Rig) -> None:
    for salt, num_cached in (("a", 0), ("b", 0), (None, 0), ("a", 7), (None, 7), ("c", 0)):
        assert await cached(rig, CHAT, chat(cache_salt=salt)) == num_cached


@played()
async def test_hits_and_misses_are_counted_in_tokens(rig: Rig) -> None:
    for _ in range(3):
        await usage(rig, CHAT, chat())
    lines = (await rig.client.get("/metrics")).content.decode().splitlines()
    assert 'podway_prefix_tokens_total{result="hit"} 14.0' in lines
    assert 'podway_prefix_tokens_total{result="miss"} 10.0' in lines
    assert f'vllm:prefix_cache_hits_total{{model_name="{MODEL}"}} 14.0' in lines
    assert f'vllm:prefix_cache_queries_total{{model_name="{MODEL}"}} 24.0' in lines
