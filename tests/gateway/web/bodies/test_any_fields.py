import random
from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from tests.gateway.rig import CHAT, Rig, Setting, chat, play
from tests.gateway.serve.assembling import assembled

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
FIELDS: dict[str, list[Any]] = {
    "stop": ["o", "</tool_call>", ["e", "é"], "\n"],
    "max_tokens": [1, 5, 30, 80],
    "min_tokens": [1],
    "ignore_eos": [True],
    "stop_token_ids": [[111], [46]],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "return_token_ids": [True],
    "logprobs": [True],
    "tools": [[TOOL], [STRICT]],
    "tool_choice": ["auto", "required", "none", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [False, True],
    "functions": [[FUNCTION]],
    "response_format": [{"type": "json_object"}],
    "guided_regex": ["[a-z]+"],
    "reasoning_effort": ["none", "high"],
}


@pytest.mark.parametrize("text", [f"Hello {CALL} x {CALL}", "<think>a\n</think>\n\nb.", "é🙂 stop"])
def test_a_stream_assembles_to_the_whole_response(text: str) -> None:
    rng = random.Random(7)
    num_told = 0

    async def scene(rig: Rig) -> None:
        nonlocal num_told
        for _ in range(20):
            names = rng.sample(sorted(FIELDS), rng.randint(1, 5))
            body = chat(**{name: rng.choice(FIELDS[name]) for name in names})
            exchange = await rig.client.post(CHAT, body)
            if exchange.status == 400:
                continue
            num_told += 1
            *chunks, _ = (await rig.client.post(CHAT, {**body, "stream": True})).events
            (choice,) = exchange.json["choices"]
            streamed = assembled(chunks)
            message = {k: v for k, v in choice["message"].items() if k != "annotations"}
            for result in (message, streamed["message"]):
                for call in result.get("tool_calls", ()):
                    del call["id"]
            assert streamed["message"] == message, body
            assert streamed["finish_reason"] == choice["finish_reason"], body
            assert streamed["logprobs"] == (choice["logprobs"] or {"content": []})["content"], body

    play(scene, Setting(texts=(text,), dialect=choose_dialect("", "hermes", "think")))
    assert num_told > 10
