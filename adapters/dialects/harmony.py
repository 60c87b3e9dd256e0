"""Harmony, the format of gpt-oss: messages on channels, each with a header.

    <|channel|>analysis<|message|>…<|end|>                                   reasoning
    <|start|>assistant<|channel|>commentary<|message|>…<|end|>               content, before a call
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>                 content

The recipient (`to=`) may also stand before the channel. Chat templates end a prompt with
`<|start|>assistant`, so the first header of an output lacks it. Format: OpenAI, "OpenAI harmony
response format" (2025).
"""

import re
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import NamedTuple

from adapters.dialects.calls.tool_calls import OfferedTools, content
from adapters.dialects.dialect import Bits, ModelDialect, ToolStyle, long_id
from adapters.dialects.parser import GeneratorParser, ReasoningMarkers
from adapters.dialects.reader import Parsing, TextReader
from engine.step import Grammar
from gateway.ports import Piece, Reasoning, StreamParser, ToolCallGrammar, ToolChoice

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN, CALL, RETURN = "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
ANALYSIS, FINAL = "analysis", "final"

_RECIPIENT = r"(?:\s*to=(?P<{}>[\w.\-]+))?"
_TYPE = rf"\s*{re.escape(CONSTRAIN)}\s*\w+"
_HEADER = re.compile(
    rf"\s*(?:{re.escape(START)}assistant)?{_RECIPIENT.format('before')}\s*"
    rf"(?:{re.escape(CHANNEL)}(?P<channel>\w+){_RECIPIENT.format('after')}(?:{_TYPE}|\s*\w+)?)?"
    rf"(?:{_TYPE})?\s*{re.escape(MESSAGE)}"
)
_BEGINNINGS = (START, CHANNEL, CONSTRAIN, "to=", MESSAGE)  # what may stand in a header
_MAX_HEADER = 256  # characters
_STOPS = (END, CALL, RETURN, START, CHANNEL)  # they end the text of a message
_STOP = re.compile("|".join(map(re.escape, _STOPS)))
_BETWEEN = "\n\n"  # the texts of two messages of one kind


def _read_whole(reader: TextReader, tools: OfferedTools) -> Parsing[None]:
    raise AssertionError("HarmonyParser parses calls")


CALL_STYLE = ToolStyle(
    _read_whole,
    mark=CHANNEL,
    head=f"commentary to=functions.%s {CONSTRAIN}json{MESSAGE}",
    special_tokens=MARKS,
)
REASONING = ReasoningMarkers(f"{CHANNEL}{ANALYSIS}{MESSAGE}", END)


class Header(NamedTuple):
    """The header of a message; `tool` is "" unless it is a tool call."""

    channel: str
    tool: str

    @classmethod
    def read(cls, found: re.Match[str]) -> "Header":
        recipient = found["before"] or found["after"] or ""
        return cls(found["channel"] or FINAL, recipient.removeprefix("functions."))


class HarmonyParser(GeneratorParser):
    """Parses the output of one choice. Text that does not follow the format is content."""

    def __init__(self, reader: TextReader, header: Header | None, tools: Container[str]) -> None:
        """`header` is that of the message which the prompt has begun; None if it has not."""
        self._tools = tools  # those whose calls are calls
        self._kinds: set[Callable[[str], Piece]] = set()  # the kinds of the pieces so far
        self._needs_gap = False  # before the next text
        super().__init__(reader, self._read(header), is_reasoning=False)

    def _read(self, header: Header | None) -> Parsing[None]:
        reader = self._reader
        if header is not None:
            yield from self._read_message(header)
        while reader.text or not reader.is_ended:
            header = yield from self._read_header()
            after_header = header is not None
            yield from self._read_message(header or Header(FINAL, ""), after_header=after_header)

    def _read_header(self) -> Parsing[Header | None]:
        """Take a header; None, and nothing is taken, if other text comes next."""
        reader = self._reader
        while (found := _HEADER.match(reader.text)) is None:
            rest = reader.text.lstrip()
            may_follow = any(rest.startswith(each) or each.startswith(rest) for each in _BEGINNINGS)
            is_late = len(rest) > _MAX_HEADER or MESSAGE in rest
            if not may_follow or is_late or reader.is_ended:
                return None
            yield
        reader.take(found.end())
        return Header.read(found)

    def _read_message(self, header: Header, *, after_header: bool = True) -> Parsing[None]:
        """Emit the text of a message, and take the mark at its end. Without a header, a mark at its
        beginning is text, since it starts no header."""
        reader, at = self._reader, 0
        if not after_header and (found := _STOP.match(reader.text)):
            at = found.end() if found[0] in (START, CHANNEL) else 0
        if header.tool in self._tools:
            reader.begin_call(header.tool)
            yield from self._emit_text(lambda size: reader.emit_arguments(reader.take(size)), at)
        else:
            kind: Callable[[str], Piece] = Reasoning if header.channel == ANALYSIS else content
            self.is_reasoning = kind is Reasoning
            self._needs_gap = kind in self._kinds
            yield from self._emit_text(lambda size: self._emit(kind, size), at)
            self.is_reasoning = False
        for mark in (END, CALL, RETURN):
            if reader.text.startswith(mark):
                reader.take(len(mark))
                return

    def _emit(self, kind: Callable[[str], Piece], size: int) -> None:
        if self._needs_gap:
            self._reader.text, size = _BETWEEN + self._reader.text, size + len(_BETWEEN)
            self._needs_gap = False
        self._kinds.add(kind)
        self._reader.emit(kind, size)

    def _emit_text(self, emit: Callable[[int], None], at: int) -> Parsing[None]:
        """Emit text up to a mark that ends it, from `at` on."""
        reader = self._reader
        while (stop := _STOP.search(reader.text, at)) is None:
            size = len(reader.text) if reader.is_ended else len(reader.text) - _withheld(reader)
            if size:
                emit(size)
                at = 0
            if reader.is_ended:
                return
            yield
        if stop.start():
            emit(stop.start())


def _withheld(reader: TextReader) -> int:
    """The length of the end of the text that may be part of a mark."""
    text = reader.text
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(s.startswith(text[at:]) for s in _STOPS) else 0


@dataclass(frozen=True, slots=True)
class HarmonyDialect(ModelDialect):
    """The dialect of gpt-oss. A message has at most one call, since `<|call|>` ends an output."""

    @property
    def special_tokens(self) -> Collection[str]:
        return MARKS

    def parser(self, prompt: str, wanted: ToolChoice, bits: Bits) -> StreamParser:
        """The parser of the output after `prompt`, which may end within a message."""
        begun = _HEADER.match(prompt, max(0, prompt.rfind(START)))
        return HarmonyParser(
            TextReader(lambda: long_id(bits), wanted.max_calls),
            None if begun is None else Header.read(begun),
            wanted.tools if self.has_tool_calls else (),
        )

    @property
    def call_mark(self) -> str:
        return ""  # other messages begin in the same way

    def without_reasoning(self, prompt: str, *, has_tools: bool) -> str:
        """The header of the answer; "" where tools may be called, whose grammar has headers."""
        is_open = prompt.endswith(f"{START}assistant")
        return f"{CHANNEL}{FINAL}{MESSAGE}" if is_open and not has_tools else ""

    def call_grammar(self, calls: ToolCallGrammar) -> Grammar | None:
        """None if free text is allowed, because its marks are control tokens."""
        if not calls.must_call and calls.answer is None:
            return None
        return ModelDialect.call_grammar(self, calls._replace(max_calls=1))
