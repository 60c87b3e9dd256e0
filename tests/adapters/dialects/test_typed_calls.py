from typing import Any

import pytest

from adapters.dialects.calls.python_call import parse_python_calls
from adapters.dialects.calls.tool_calls import NotACall
from adapters.dialects.calls.xml_call import parse_parameters
from adapters.dialects.jinja_template import JinjaTemplate
from tests.adapters.dialects.test_round_trip import GRANITE_3, called


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", None, "5"),
        ("5", {"type": "integer"}, 5),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5),
        ("[1", {"type": "array"}, "[1"),
        ('{"a": 1}', {"$ref": "#/$defs/x"}, {"a": 1}),
        ('"quoted"', {"type": ["string", "null"]}, '"quoted"'),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("1e999", {"type": "number"}, 1.7976931348623157e308),
        ("NaN", {"type": "number"}, "NaN"),
        ("5", {"anyOf": "?", "type": 3, "required": 4}, 5),
    ],
)
def test_the_schema_of_a_parameter_decides_its_type(text: str, schema: Any, value: Any) -> None:
    tool = {
        "properties": {"p": {} if schema is None else schema},
        "$defs": {"x": {"type": "object"}},
    }
    found = parse_parameters(f"<parameter=p>\n{text}\n</parameter>", tool)["p"]
    assert (found, type(found)) == (value, type(value))


def test_text_between_parameters_makes_a_call_content() -> None:
    parameter = "<parameter=a>\n1\n</parameter>\n"
    assert parse_parameters(parameter, None) == {"a": "1"}
    for other in (parameter + "so", "<parameter=a>\n1"):
        with pytest.raises(NotACall):
            parse_parameters(other, None)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("f()", [("f", {})]),
        ("f(a=1, b='x', c=None)\ng-2.h(x=[true, null])",
         [("f", {"a": 1, "b": "x", "c": None}), ("g-2.h", {"x": [True, None]})]),
        (' f( a = "),\\n" , ) ', [("f", {"a": "),\n"})]),
    ],
)  # fmt: skip
def test_python_calls_are_read(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parse_python_calls(text) == calls


@pytest.mark.parametrize(
    "text", ["", "f", "f(", "f(1)", "f(a=)", "f(a=1 b=2)", "f(a=b)", "f(a=1) so", "f(a='x)"]
)
def test_text_that_only_resembles_python_calls_is_none(text: str) -> None:
    with pytest.raises(NotACall):
        parse_python_calls(text)


def test_calls_are_content_where_the_template_renders_no_calls() -> None:
    calls = called(("f", {"a": 1}))
    history: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "000000000", "content": "two"},
    ]
    written = '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|end_of_text|>'
    assert written in JinjaTemplate({"default": GRANITE_3}, {}).render(history)
