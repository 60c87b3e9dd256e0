"""Parses tool calls whose arguments are tags: Qwen3.5 and Qwen3-Coder write

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text, so the tool's schema decides whether it is a string or JSON. A call is emitted when
it is complete, its arguments as JSON.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from adapters.dialects.calls.tool_calls import (
    HERMES_CLOSE,
    HERMES_OPEN,
    NotACall,
    OfferedTools,
    whole_reader,
)

_CALL = re.compile(r"\s*<function=([^>\s]{1,64})>\s*(.*?)\s*(?:</function>\s*)?", re.S)
_PARAMETER = re.compile(r"\s*<parameter=([^>]{1,256})>\n?(.*?)\n?</parameter>", re.S)
_WORDS = {"True": True, "False": False, "None": None}  # as Jinja writes them
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
}


def _parse(body: str, tools: OfferedTools) -> list[tuple[str, dict[str, Any]]]:
    found = _CALL.fullmatch(body)
    if found is None:
        raise NotACall
    return [(found[1], parse_parameters(found[2], tools.get(found[1])))]


read_xml_calls = whole_reader(HERMES_OPEN, HERMES_CLOSE, _parse)


def parse_parameters(text: str, schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments in `<parameter=…>` tags. Raises `NotACall` for other text between them."""
    properties = (schema or {}).get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    at = 0
    while (found := _PARAMETER.match(text, at)) is not None:
        arguments[found[1]] = typed_value(found[2], properties.get(found[1]))
        at = found.end()
    if text[at:].strip():
        raise NotACall
    return arguments


def typed_value(text: str, schema: object) -> Any:
    """The value that `text` is for a parameter with this schema.

    A string if the schema allows strings or says nothing, unless the text is JSON of another type
    that the schema names too; otherwise JSON if it is JSON.
    """
    types = allowed_types(schema)
    if types <= {"string"}:
        return text
    try:
        value = _WORDS[text] if text in _WORDS else json.loads(text)
    except ValueError:
        return text
    if "string" not in types:
        return value
    wanted = tuple(_TYPES[name] for name in types if name in _TYPES)
    is_other = any(isinstance(value, kind) for kind in wanted)
    return value if is_other and not isinstance(value, str) else text


def allowed_types(schema: object) -> set[str]:
    """The `type` names of a schema, and of the alternatives in it; empty if it has none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {*(named if isinstance(named, list) else ())}
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        if isinstance(alternatives, list):
            found.update(*map(allowed_types, alternatives))
    if not found and "$ref" in schema:
        return {"object"}
    return found


def xml_call_pattern(names: str) -> str:
    """A regular expression for a call of a tool that matches `names`, with any parameters."""
    value = r"(?:[^<]|<[^/]|</[^p])*"
    parameter = rf"<parameter=[^>\n]{{1,256}}>\n{value}\n</parameter>\n"
    return rf"{HERMES_OPEN}\n<function=(?:{names})>\n(?:{parameter})*</function>\n{HERMES_CLOSE}\n?"
