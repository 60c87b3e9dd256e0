"""Finds the end of a JSON object or array in text that arrives in pieces.

Only brackets outside strings are counted, so the text can be emitted before the value is
complete.
"""

import re

_MARKS = re.compile(r'["\\{}\[\]<]')


class JsonSpan:
    """`depth` is the number of brackets open before the first text; 0 if the value begins there."""

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
