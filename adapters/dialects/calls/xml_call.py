"""Parses tool calls whose arguments are tags: Qwen3.5 and Qwen3-Coder write

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text, so the tool's schema decides whether it is a string or JSON. A call is emitted when
it is complete, its arguments as JSON. Of a constrained call, parameters come in the schema's order.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from adapters.dialects.calls.schemas import (
    DECODER,
    NUMBER_BOUNDS,
    Parameter,
    Schema,
    SchemaReader,
    has_type,
    listed_values,
    others_of,
    parameters_of,
    string_patterns,
    unwritable,
)
from adapters.dialects.calls.tool_calls import (
    HERMES_CLOSE,
    HERMES_OPEN,
    NotACall,
    OfferedTools,
    whole_reader,
)
from engine.errors import InvalidRequest

_CALL = re.compile(r"\s*<function=([^>\s]{1,64})>\s*(.*?)\s*(?:</function>\s*)?", re.S)
_PARAMETER = re.compile(r"\s*<parameter=([^>]{1,256})>\n?(.*?)\n?</parameter>", re.S)
_WORDS = {"True": True, "False": False, "None": None}  # as Jinja writes them
_CLOSE = "\n</parameter>\n"
_MARKS = ["</parameter>", HERMES_CLOSE]  # no value contains them
_NAME = re.compile(r"[^<>\n]{1,256}")
_BLANK = r"[ \t\r\n]*"
_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+\-]?\d+)?"
# By type: how a value is written, and all texts that are read as one (of arrays and objects more).
_WRITTEN = {
    "null": "null",
    "boolean": "true|false",
    "integer": r"-?(?:0|[1-9]\d{0,17})",
    "number": r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,17})?(?:[eE][+\-]?\d{1,2})?",
}
_READ = {
    "null": f"None|{_BLANK}null{_BLANK}",
    "boolean": f"True|False|{_BLANK}(?:true|false){_BLANK}",
    "integer": _BLANK + _NUMBER + _BLANK,
    "number": _BLANK + _NUMBER + _BLANK,
    "array": rf"{_BLANK}\[.*",
    "object": rf"{_BLANK}\{{.*",
}


def _parse(body: str, tools: OfferedTools) -> list[tuple[str, dict[str, Any]]]:
    found = _CALL.fullmatch(body)
    if found is None:
        raise NotACall
    return [(found[1], parse_parameters(found[2], tools.get(found[1])))]


read_xml_calls = whole_reader(HERMES_OPEN, HERMES_CLOSE, _parse)


def parse_parameters(text: str, schema: Schema | None) -> dict[str, Any]:
    """The arguments in `<parameter=…>` tags. Raises `NotACall` for other text between them."""
    arguments: dict[str, Any] = {}
    at = 0
    while (found := _PARAMETER.match(text, at)) is not None:
        arguments[found[1]] = typed_value(found[2], _types(found[1], schema))
        at = found.end()
    if text[at:].strip():
        raise NotACall
    return arguments


def _types(name: str, schema: Schema | None) -> set[str]:
    """The types of a parameter; empty if its schema says nothing."""
    try:
        reader = SchemaReader(schema)
        known = {each.name: each.schema for each in parameters_of(reader.root)}
        return reader.types(known.get(name, reader.root.get("additionalProperties")))
    except (InvalidRequest, RecursionError):
        return set()


def typed_value(text: str, types: set[str]) -> Any:
    """The value that `text` is for a parameter of one of these types.

    A string if they have strings or are none, unless the text is JSON of another of the types;
    otherwise JSON if it is JSON.
    """
    if types <= {"string"}:
        return text
    try:
        value = _WORDS[text] if text in _WORDS else DECODER.decode(text)
    except (ValueError, RecursionError):
        return text
    return value if "string" not in types or has_type(value, [*types - {"string"}]) else text


def xml_structure(name: str, schema: Schema | None) -> dict[str, Any]:
    """The tagged structure of a call whose arguments match the schema; None allows any."""
    reader = SchemaReader(schema)
    inside: list[Any] = []
    for each in parameters_of(reader.root):
        if _NAME.fullmatch(each.name):
            part = [f"<parameter={each.name}>\n", _value_part(each, reader)]
            inside.append(part if each.is_required else {"maybe": part})
        elif each.is_required:
            raise unwritable(f"The parameter name {json.dumps(each.name)}")
    others = others_of(reader.root)
    if others is not False:
        value = _value_part(Parameter("", others, is_required=False), reader)
        tag = ["<parameter=", {"regex": "[^<>\n]{1,64}"}, ">\n"]
        inside.append({"many": [*tag, value]})
    begin = f"{HERMES_OPEN}\n<function={name}>\n"
    return {"begin": begin, "inside": inside, "end": f"</function>\n{HERMES_CLOSE}"}


def _value_part(parameter: Parameter, reader: SchemaReader) -> Any:
    """The value of a parameter and its closing tag. Text is read as a string if it is nothing else
    that the schema allows, so it must not look like that."""
    types = reader.types(parameter.schema)
    if types and "string" not in types:
        return _json_part(parameter.schema, reader)
    looks = [_READ[name] for name in sorted(types & _READ.keys())]
    options = [(each, listed_values(each)) for each in reader.alternatives(parameter.schema)]
    is_free = any(listed is None and _type(each) == "string" for each, listed in options)
    ways: list[Any] = []
    for option, listed in options:
        if listed is not None:
            ways += [f"{text}{_CLOSE}" for text in _readable(listed, types)]
        elif _type(option) == "string":
            ways.append(_text_part(string_patterns(option), looks))
        elif not is_free or _type(option) not in _WRITTEN:
            ways.append(_json_part(option, reader))
        elif option.keys().isdisjoint(NUMBER_BOUNDS):  # with bounds there is text only
            ways.append(_text_part([_WRITTEN[_type(option)]], []))
    if not ways:
        raise unwritable(f"The schema of the parameter {json.dumps(parameter.name)}")
    return {"any": ways}


def _json_part(schema: Any, reader: SchemaReader) -> Any:
    return [{"schema": reader.rooted(schema), "without": _MARKS}, _CLOSE]


def _type(schema: Schema) -> str:
    return str(schema.get("type", "string"))


def _text_part(matching: list[str], unlike: list[str]) -> dict[str, Any]:
    return {"until": _CLOSE, "without": _MARKS, "matching": matching, "unlike": unlike}


def _readable(values: list[Any], types: set[str]) -> Iterator[str]:
    """The texts of those values that are read as what they are."""
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        read = typed_value(text, types)
        if (type(read), read) == (type(value), value) and not any(m in text for m in _MARKS):
            yield text
