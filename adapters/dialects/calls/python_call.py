"""Parses tool calls in the form of Python calls: OLMo 3 writes

    <function_calls>NAME(key=VALUE, key=VALUE)
    NAME()</function_calls>

with values in JSON, or as literals of Python without braces. The calls are emitted when the block
is complete, their arguments as JSON.
"""

import ast
import json
import re
from typing import Any, NamedTuple

from adapters.dialects.calls.schemas import (
    DECODER,
    Schema,
    SchemaReader,
    others_of,
    parameters_of,
    separated,
    unwritable,
)
from adapters.dialects.calls.tool_calls import NotACall, whole_reader

OPEN, CLOSE = "<function_calls>", "</function_calls>"
_HEAD = re.compile(r"\s*([\w.\-]{1,64})\(\s*")
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
_NEXT = re.compile(r"\s*,\s*")
_END = re.compile(r"\s*\)\s*")
_LITERAL = re.compile(r"'(?:[^'\\\n]|\\.)*'|True|False|None")


class PythonCall(NamedTuple):
    """The name of a tool and its arguments."""

    name: str
    arguments: dict[str, Any]


def parse_python_calls(text: str) -> list[PythonCall]:
    """The calls in `text`, at least one. Raises `NotACall`."""
    calls, at = [], 0
    while at < len(text):
        head = _HEAD.match(text, at)
        if head is None:
            raise NotACall
        arguments, at = _arguments(text, head.end())
        calls.append(PythonCall(head[1], arguments))
    if not calls:
        raise NotACall
    return calls


def _arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The arguments from `at` on, and the position after the closing parenthesis."""
    found: dict[str, Any] = {}
    while (end := _END.match(text, at)) is None:
        key = _KEY.match(text, at)
        if key is None:
            raise NotACall
        found[key[1]], at = _value(text, key.end())
        after = _NEXT.match(text, at)
        if after is None and _END.match(text, at) is None:
            raise NotACall
        at = at if after is None else after.end()
    return found, end.end()


def _value(text: str, at: int) -> tuple[Any, int]:
    literal = _LITERAL.match(text, at)
    try:
        if literal is not None:
            return ast.literal_eval(literal[0]), literal.end()
        return DECODER.raw_decode(text, at)
    except (ValueError, SyntaxError, RecursionError):
        raise NotACall from None


def python_structure(name: str, schema: Schema | None) -> dict[str, Any]:
    """The tagged structure of a call whose arguments match the schema, with values in JSON; None
    allows any."""
    reader = SchemaReader(schema)
    rules: dict[str, Any] = {}
    entries: list[tuple[Any, bool]] = []
    for each in parameters_of(reader.root):
        if _KEY.fullmatch(f"{each.name}="):
            value = {"schema": reader.rooted(each.schema), "without": [CLOSE]}
            entries.append(([f"{each.name}=", value], each.is_required))
        elif each.is_required:
            raise unwritable(f"The parameter name {json.dumps(each.name)}")
    others = others_of(reader.root)
    if others is not False and not entries:
        value = {"schema": reader.rooted(others), "without": [CLOSE]}
        rules["other"] = [{"regex": "[A-Za-z_][A-Za-z0-9_]{0,63}"}, "=", value]
        more = {"many": [", ", {"rule": "other"}]}
        inside: Any = {"maybe": [{"rule": "other"}, more]}
    else:
        inside = separated(entries, ", ", rules, "arg")
    return {"begin": f"{OPEN}{name}(", "inside": inside, "end": f"){CLOSE}", "rules": rules}


read_python_calls = whole_reader(OPEN, CLOSE, lambda body, _: parse_python_calls(body))
