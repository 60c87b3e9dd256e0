"""LiteLLM against a server, in the environment of `make clients`: prints one JSON object.

python litellm_calls.py URL
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the table that came with it; no network

import litellm

URL = sys.argv[1] + "/v1"
ASK: dict[str, Any] = {
    "model": "openai/builtin",
    "api_base": URL,
    "api_key": "any",
    "messages": [{"role": "user", "content": "Hello!"}],
    "temperature": 0,
}


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def at_once() -> list[str]:
    answers = await asyncio.gather(*(litellm.acompletion(**ASK) for _ in range(3)))
    return [answer.choices[0].message.content for answer in answers]


def tokens_in(chunk: Any) -> int:
    usage = getattr(chunk, "usage", None)
    return usage.completion_tokens if usage else 0


def main() -> None:
    whole = litellm.completion(**ASK)
    chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]  # that of the usage has none
    results = {
        "whole": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "completion_tokens": whole.usage.completion_tokens,
        "stream": "".join(choice.delta.content or "" for choice in choices),
        "stream_tokens": max(tokens_in(chunk) for chunk in chunks),
        "async": asyncio.run(at_once()),
    }
    called = litellm.completion(
        **{**ASK, "messages": [{"role": "user", "content": "What is the weather in Paris?"}]},
        tools=[TOOL],
        tool_choice="required",
    )
    results["tool"] = called.choices[0].message.tool_calls[0].function.name
    results["tool_reason"] = called.choices[0].finish_reason
    try:
        litellm.completion(**{**ASK, "temperature": 9})
    except litellm.BadRequestError as error:
        results["error"] = str(error)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
