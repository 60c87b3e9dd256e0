"""A tool call in JSON, `{"name": …, "arguments": {…}}`, streamed as soon as it is surely one.

Written in this order, the call begins when its arguments do, and they are passed on as they
come. An object in another order is read whole. What is no call is left in the reader.
"""

import json
import re
from collections.abc import Container
from typing import Any, NamedTuple

from adapters.dialects.json_span import JsonSpan
from adapters.dialects.reader import Reads, TextReader

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEADER = 512  # characters; a longer one is read whole
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"([^"\\]*)"|[^"\s])')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})


class Anything:
    """A container of all names: whatever is called is a call."""

    def __contains__(self, name: object) -> bool:
        return True


class _Call(NamedTuple):
    name: str
    arguments: str


def read_call(reader: TextReader, names: Container[str]) -> Reads[bool]:
    """Read one call of a tool in `names` from the reader; False: there is none, nothing is taken.

    Afterwards the closing brace is taken too, if it is there.
    """
    span, num_scanned = JsonSpan(), 0
    while True:
        header = _HEADER.match(reader.text[:_MAX_HEADER])
        name = None if header is None else _string(header[1])
        if header is not None and name is not None:
            if name not in names:
                return False
            reader.take(header.end())
            reader.call(name)
            yield from read_arguments(reader)
            yield from _close(reader)
            reader.passed = ""
            return True
        end = span.feed(reader.text[num_scanned:])
        if end is not None:
            return _read_whole(reader, num_scanned + end, names)
        num_scanned = len(reader.text)
        if span.is_broken or reader.is_ended or not _may_be_call(reader.text):
            return False
        yield


def read_arguments(reader: TextReader) -> Reads[None]:
    """Pass on the JSON object that comes next, up to its end or to where it is none."""
    span = JsonSpan()
    while True:
        end = span.feed(reader.text)
        if text := reader.take(len(reader.text) if end is None else end):
            reader.argue(text)
        if end is not None or reader.is_ended:
            return
        yield


def _close(reader: TextReader) -> Reads[None]:
    """The rest of the object around the arguments; a brace that was forgotten is forgiven."""
    following = yield from reader.peek()
    if following == "}":
        yield from reader.accept("}")
    elif following == ",":
        yield from _skip_object(reader)


def _skip_object(reader: TextReader) -> Reads[None]:
    """Over what else a call may say, such as an id."""
    span = JsonSpan(depth=1)
    while True:
        end = span.feed(reader.text)
        reader.take(len(reader.text) if end is None else end)
        if end is not None or reader.is_ended:
            return
        yield


def _read_whole(reader: TextReader, size: int, names: Container[str]) -> bool:
    found = _parsed(reader.text[:size])
    if found is None or found.name not in names:
        return False
    reader.take(size)
    reader.passed = ""
    reader.call(*found)
    return True


def _parsed(text: str) -> _Call | None:
    """A call written in any order, `{"type": "function", "function": {…}}` too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    match value:
        case {"name": str(name)} if name:
            given = [value[key] for key in ("arguments", "parameters") if key in value]
            arguments = _arguments(given[0] if given else {})
            return None if arguments is None else _Call(name, arguments)
    return None


def _arguments(given: Any) -> str | None:
    if isinstance(given, str):
        return given
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else None


def _may_be_call(text: str) -> bool:
    """Whether an object that begins like this is worth waiting for."""
    if not text.lstrip():
        return True
    if not text.lstrip().startswith("{"):
        return False
    first = _FIRST_KEY.match(text)
    return first is None or first[1] in _KEYS


def _string(literal: str) -> str | None:
    try:
        name = json.loads(literal)
    except ValueError:
        return None
    return name if isinstance(name, str) and name else None
