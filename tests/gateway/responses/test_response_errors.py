from typing import Any

import orjson
import pytest

from tests.gateway.answers import answer_to
from tests.gateway.responses.asking import HERMES, PATH, ask
from tests.gateway.rig import MODEL, Rig, Setting, played

DEEP = {"enum": orjson.loads("[" * 100 + "]" * 100)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "no", "output": ""}]}, "input"),
        ({"model": "gpt-4o"}, "model"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": {"id": 7}}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 300}, "input"),
        ({"include": ["everything"]}, "include[0]"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "extra": 1}]}, "tools[0].extra"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": DEEP}}},
            "text.format.schema",
        ),
        ({"text": {"verbosity": "terse"}}, "text.verbosity"),
        ({"reasoning": {"effort": "immense"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"messages": []}, "messages"),
    ],
)
def test_the_error_names_the_invalid_field(fields: dict[str, Any], param: str) -> None:
    answer = answer_to(PATH, ask(**fields), Setting(dialect=HERMES, rejects_unknown_fields=True))
    error = answer.json["error"]
    assert answer.status in (400, 404)
    assert error["param"] == param, error


@played()
async def test_an_unpaired_surrogate_is_rejected(rig: Rig) -> None:
    body = b'{"model":"%b","input":"x","user":"\\ud800"}' % MODEL.encode()
    assert (await rig.client.post(PATH, body)).status == 400
