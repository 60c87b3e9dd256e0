import json
from collections.abc import Iterator
from typing import Any

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
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = ("--tool-dialect", "qwen-xml", "--threads", "1")
    with (
        start_server(tmp_path_factory.mktemp("tags"), *flags) as server,
        openai.OpenAI(base_url=f"{read_url(server)}/v1", api_key="any") as client,
    ):
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
