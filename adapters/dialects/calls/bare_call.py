"""Parses tool calls that are not JSON: `call:NAME{key:value,…}` with strings between quote marks.

FunctionGemma (Gemma 3) and Gemma 4 write them. A call is emitted when it is complete, its arguments
as JSON.
"""

import re
from typing import Any, NamedTuple

from adapters.dialects.calls.schemas import DECODER
from adapters.dialects.calls.tool_calls import NotACall, ParseOutput, whole_reader

_HEAD = re.compile(r"\s*call:\s*([\w.\-]{1,64})\s*(?=\{)")
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"\s*([^:,{}\[\]]+?)\s*:")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_MAX_DEPTH = 32


class BareCallMarks(NamedTuple):
    """The marks before and after a call, and around each string in it."""

    open: str
    close: str
    quote: str


def make_bare_reader(marks: BareCallMarks) -> ParseOutput:
    """The parser of outputs with such calls."""
    return whole_reader(
        marks.open, marks.close, lambda body, _: [parse_bare_call(body, marks.quote)]
    )


def parse_bare_call(text: str, quote: str) -> tuple[str, dict[str, Any]]:
    """The name and arguments of `call:NAME{…}`. Raises `NotACall`."""
    head = _HEAD.match(text)
    if head is None:
        raise NotACall
    values = _Values(text, head.end(), quote)
    arguments = values.read(0)
    if not isinstance(arguments, dict) or text[values.at :].strip():
        raise NotACall
    return head[1], arguments


class _Values:
    """A recursive parser with its position `at` in the text."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self.at = at
        self._text = text
        self._quote = quote

    def read(self, depth: int) -> Any:
        """The value at the position."""
        if depth > _MAX_DEPTH:
            raise NotACall
        self._skip_blanks()
        if self._accepts(self._quote):
            return self._quoted()
        if self._accepts("{"):
            return dict(self._items("}", depth, has_keys=True))
        if self._accepts("["):
            return [value for _, value in self._items("]", depth, has_keys=False)]
        return self._bare()

    def _items(self, end: str, depth: int, *, has_keys: bool) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        self._skip_blanks()
        if self._accepts(end):
            return found
        while True:
            key = self._key() if has_keys else ""
            found.append((key, self.read(depth + 1)))
            self._skip_blanks()
            if self._accepts(end):
                return found
            if not self._accepts(","):
                raise NotACall

    def _key(self) -> str:
        self._skip_blanks()
        if self._accepts(self._quote):
            key = self._quoted()
            if not self._accepts(":"):
                raise NotACall
            return key
        match = _KEY.match(self._text, self.at)
        if match is None:
            raise NotACall
        self.at = match.end()
        return match[1]

    def _quoted(self) -> str:
        end = self._text.find(self._quote, self.at)
        if end < 0:
            raise NotACall
        found = self._text[self.at : end]
        self.at = end + len(self._quote)
        return found

    def _bare(self) -> Any:
        """A number, true, false, null, or a word that was not quoted."""
        match = _BARE.match(self._text, self.at)
        word = "" if match is None else match[0].strip()
        if match is None or not word:
            raise NotACall
        self.at = match.end()
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        try:
            return DECODER.decode(word)
        except ValueError:
            return word

    def _accepts(self, mark: str) -> bool:
        if not self._text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def _skip_blanks(self) -> None:
        while self._text[self.at : self.at + 1].isspace():
            self.at += 1
