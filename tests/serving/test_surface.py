import asyncio
import json
from typing import Any

import aiohttp
import jsonschema
import pytest

from tests.gateway.serve.assembling import assembled
from tests.serving.client import Json, stream, whole

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CITY: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Json = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY},
}
OTHER: Json = {"type": "function", "function": {"name": "nothing", "parameters": {}}}
HELLO = [{"role": "user", "content": "Hello"}]


async def both_ways(session: aiohttp.ClientSession, url: str, body: Json) -> Json:
    """The one choice of a whole reply, checked to equal the stream with the same seed."""
    reply = await whole(session, url, CHAT, body)
    chunks = [chunk async for chunk in stream(session, url, body, CHAT)]
    (choice,) = reply["choices"]
    streamed = assembled(chunks)
    assert streamed["finish_reason"] == choice["finish_reason"]
    for name in ("content", "reasoning_content"):
        assert streamed["message"].get(name) == choice["message"].get(name)
    assert calls_of(streamed) == calls_of(choice)
    first: Json = choice
    return first


def calls_of(choice: Json) -> list[Json]:
    return [call["function"] for call in choice["message"].get("tool_calls", ())]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ],
)
async def test_a_required_call_comes_at_any_temperature(
    server_url: str, fields: dict[str, Any]
) -> None:
    body = {"messages": HELLO, "tools": [WEATHER, OTHER], "temperature": 1.3, "max_tokens": 120}
    async with aiohttp.ClientSession() as session:
        bodies = [{**body, **fields, "seed": seed} for seed in range(6)]
        choices = await asyncio.gather(*(both_ways(session, server_url, b) for b in bodies))
    ended = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert len(ended) >= 3
    for choice in ended:
        assert choice["message"]["content"] is None
        calls = calls_of(choice)
        assert len(calls) == 1 or (calls and "parallel_tool_calls" not in fields)
        for call in calls:
            arguments = json.loads(call["arguments"])
            if call["name"] == "weather":
                jsonschema.validate(arguments, CITY)
            else:
                assert (call["name"], arguments) == ("nothing", {})
                assert fields["tool_choice"] == "required"


async def test_an_echoed_answer_has_the_same_log_probabilities(
    server_url: str,
) -> None:
    with_stream = {"prompt": "What is Podway?", "temperature": 0.8, "seed": 3, "max_tokens": 12}
    with_stream |= {"logprobs": 2, "return_token_ids": True}
    async with aiohttp.ClientSession() as session:
        (answer,) = (await whole(session, server_url, TEXT, with_stream))["choices"]
        shown = len(answer["logprobs"]["tokens"])
        ids = answer["prompt_token_ids"] + answer["token_ids"][:shown]
        again = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 0}
        (echoed,) = (await whole(session, server_url, TEXT, again))["choices"]
    assert echoed["text"].endswith(answer["text"])
    assert echoed["logprobs"]["tokens"][-shown:] == answer["logprobs"]["tokens"]
    was, now = answer["logprobs"]["token_logprobs"], echoed["logprobs"]["token_logprobs"][-shown:]
    assert now == pytest.approx(was, abs=1e-4)
    offsets = echoed["logprobs"]["text_offset"]
    for at, token in zip(offsets, echoed["logprobs"]["tokens"], strict=True):
        assert echoed["text"].startswith(token, at)
