"""Parses a tool call in JSON, `{"name": …, "arguments": {…}}`, and streams its arguments.

In this order of keys the call is emitted when its arguments begin, and they are emitted as they
arrive. An object with another order is parsed when it is complete. Text that is not a call stays
in the reader.
"""

import json
import re
from collections.abc import Container
from typing import Any, NamedTuple

from adapters.dialects.reader import Parsing, TextReader

_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEADER = 512  # characters; a call with a longer header is parsed when it is complete
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"([^"\\]*)"|[^"\s])')
_MARKS = re.compile(r'["\\{}\[\]<]')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})


class _Call(NamedTuple):
    name: str
    arguments: str


def read_call(reader: TextReader, names: Container[str]) -> Parsing[bool]:
    """Parse one call of a tool in `names`, with its closing brace if there is one.

    Returns False and takes no text if there is no call.
    """
    span, num_scanned = JsonSpan(), 0
    while True:
        header = _HEADER.match(reader.text[:_MAX_HEADER])
        name = None if header is None else _string(header[1])
        if header is not None and name is not None:
            if name not in names:
                return False
            reader.take(header.end())
            reader.begin_call(name)
            yield from read_arguments(reader)
            yield from _close(reader)
            reader.skipped = ""
            return True
        end = span.feed(reader.text[num_scanned:])
        if end is not None:
            return _read_whole(reader, num_scanned + end, names)
        num_scanned = len(reader.text)
        if span.is_invalid or reader.is_ended or not _may_be_call(reader.text):
            return False
        yield


def read_arguments(reader: TextReader) -> Parsing[None]:
    """Emit the next JSON object as arguments, up to its end or to the first invalid character."""
    span = JsonSpan()
    while True:
        end = span.feed(reader.text)
        if text := reader.take(len(reader.text) if end is None else end):
            reader.emit_arguments(text)
        if end is not None or reader.is_ended:
            return
        yield


def _close(reader: TextReader) -> Parsing[None]:
    """Skip the rest of the object around the arguments; its closing brace may be missing."""
    following = yield from reader.peek()
    if following == "}":
        yield from reader.accept("}")
    elif following == ",":
        yield from _skip_object(reader)


def _skip_object(reader: TextReader) -> Parsing[None]:
    """Skip other fields of a call, such as an id."""
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
    reader.skipped = ""
    reader.begin_call(*found)
    return True


def _parsed(text: str) -> _Call | None:
    """A call with any order of keys, or in the form `{"type": "function", "function": {…}}`."""
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
    """Whether more text could turn `text` into a call."""
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


class JsonSpan:
    """Finds the end of a JSON object or array in text that arrives in pieces.

    Only brackets outside strings are counted, so the text can be emitted before the value is
    complete. `depth` brackets are open before the first text; 0 if the value begins there.
    """

    __slots__ = ("_depth", "_in_string", "_is_escaped", "is_invalid")

    def __init__(self, depth: int = 0) -> None:
        self.is_invalid = False  # a `<` outside strings, which JSON never has: a mark begins there
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """The number of characters of `text` up to the value's end; None if it does not end."""
        start = 0
        if self._is_escaped and text:
            self._is_escaped = False
            start = 1
        while (match := _MARKS.search(text, start)) is not None:
            start = match.end()
            if self._in_string:
                start = self._inside(match[0], start, len(text))
            elif match[0] == "<":
                self.is_invalid = True
                return match.start()
            elif self._closes(match[0]):
                return start
        return None

    def _inside(self, char: str, start: int, size: int) -> int:
        """Handle a quote or backslash within a string; returns where to search next."""
        if char == '"':
            self._in_string = False
        elif char == "\\":
            self._is_escaped = start == size
            return start + 1
        return start

    def _closes(self, char: str) -> bool:
        """Whether this character outside strings ends the value."""
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return char in "}]" and self._depth <= 0
