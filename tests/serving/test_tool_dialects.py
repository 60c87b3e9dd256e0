import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from tests.conftest import read_url, start_server

QUESTION = "What is the weather in Paris?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "get_weather", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("tags")
    with start_server(directory, "--tool-dialect", "qwen-xml", "--threads", "1") as server:
        yield read_url(server)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


def weather(arguments: str) -> str:
    """What the tool answers to valid arguments."""
    found = json.loads(arguments)
    jsonschema.validate(found, SCHEMA)
    return json.dumps({"degrees": 20, "unit": found["unit"]})


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_call_is_executed_and_answered_over_chat(
    client: openai.OpenAI, choice: Any
) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: Any = {"model": "builtin", "tools": [TOOL], "temperature": 0}
    asked = client.chat.completions.create(messages=messages, tool_choice=choice, **fields)
    message = asked.choices[0].message
    assert asked.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        assert call.type == "function"
        content = weather(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    answered = client.chat.completions.create(messages=messages, tool_choice="none", **fields)
    assert answered.choices[0].message.content


def test_a_forced_call_is_executed_and_answered_over_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    fields: Any = {"model": "builtin", "tools": tools, "temperature": 0}
    asked = client.responses.create(input=QUESTION, tool_choice="required", **fields)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": weather(item.arguments)}
        for item in asked.output
        if item.type == "function_call"
    ]
    assert len(outputs) == len(asked.output) > 0
    answered = client.responses.create(
        input=outputs, previous_response_id=asked.id, tool_choice="none", **fields
    )
    assert answered.output_text


def test_a_forced_call_is_executed_and_answered_over_messages(url: str) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA, "strict": True}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    fields: Any = {"model": "builtin", "max_tokens": 200, "tools": tools}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        asked = client.messages.create(messages=messages, tool_choice={"type": "any"}, **fields)
        assert asked.stop_reason == "tool_use"
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": weather(json.dumps(block.input)),
            }
            for block in asked.content
            if block.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": [block.model_dump() for block in asked.content]},
            {"role": "user", "content": results},
        ]
        answered = client.messages.create(messages=messages, tool_choice={"type": "none"}, **fields)
    assert [block.type for block in answered.content] == ["text"]
