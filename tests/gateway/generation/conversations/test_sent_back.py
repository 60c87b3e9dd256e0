from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from tests.gateway.rig import CHAT, MODEL, USER, Rig, Setting, play

HERMES = choose_dialect("", "hermes", "think")
PARAMETERS = {"type": "object"}
OUTPUTS = {
    "cut off in the arguments": '<tool_call>\n{"name": "f", "arguments": {"city": "Osl',
    "arguments that are no object": '<tool_call>\n{"name": "f", "arguments": "Oslo"}\n</tool_call>',
    "broken JSON": '<tool_call>\n{"name": "f", "arguments": {city}}\n</tool_call>',
    "reasoning only": "<think>Hm",
    "nothing": "",
}
EACH_OUTPUT = pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)


def setting(output: str) -> Setting:
    return Setting(texts=(output, "Fine."), dialect=HERMES)


async def posted(rig: Rig, path: str, **fields: Any) -> Any:
    exchange = await rig.client.post(path, {"model": MODEL, **fields})
    body = exchange.json
    assert exchange.status == 200, body
    return body


@EACH_OUTPUT
def test_a_chat_message_is_accepted(output: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]

    async def scene(rig: Rig) -> None:
        first = await posted(rig, CHAT, messages=USER, tools=tools)
        message = first["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": "?"}
            for each in message.get("tool_calls", ())
        ]
        history = [*USER, message, *results, *USER]
        second = await posted(rig, CHAT, messages=history, tools=tools)
        assert second["choices"][0]["message"]["content"] == "Fine."

    play(scene, setting(output))


@EACH_OUTPUT
@pytest.mark.parametrize("is_stored", [True, False])
def test_response_items_are_accepted(output: str, is_stored: bool) -> None:
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}]

    async def scene(rig: Rig) -> None:
        path = "/v1/responses"
        first = await posted(rig, path, input="hi", tools=tools, store=is_stored)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "?"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        more = [*results, *USER]
        if is_stored:
            fields = {"input": more, "previous_response_id": first["id"]}
        else:
            fields = {"input": [*USER, *first["output"], *more]}
        second = await posted(rig, path, tools=tools, **fields)
        assert second["output"][-1]["content"][0]["text"] == "Fine."

    play(scene, setting(output))


@EACH_OUTPUT
def test_anthropic_blocks_are_accepted(output: str) -> None:
    tools = [{"name": "f", "input_schema": PARAMETERS}]

    async def scene(rig: Rig) -> None:
        fields = {"tools": tools, "max_tokens": 100}
        first = await posted(rig, "/v1/messages", messages=USER, **fields)
        content = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "?"}
            for block in first["content"]
            if block["type"] == "tool_use"
        ]
        assistant = {"role": "assistant", "content": first["content"]}
        history = [
            *USER,
            assistant,
            {"role": "user", "content": [*content, {"type": "text", "text": "hi"}]},
        ]
        second = await posted(rig, "/v1/messages", messages=history, **fields)
        assert second["content"] == [{"type": "text", "text": "Fine."}]

    play(scene, setting(output))
