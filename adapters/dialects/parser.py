"""The `StreamParser` of a dialect: optional reasoning, then content and tool calls."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from adapters.dialects.calls.tool_calls import OfferedTools, ParseOutput, emit_rest
from adapters.dialects.reader import Parsing, TextReader
from gateway.ports import Piece, Reasoning


class ReasoningMarkers(NamedTuple):
    """The marks around a model's reasoning; `label` follows the first one (Gemma 4)."""

    open: str
    close: str
    label: str = ""


class GeneratorParser:
    """Runs `parsing`, a generator over the reader, whenever text has arrived."""

    def __init__(self, reader: TextReader, parsing: Parsing[None], *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        self._reader = reader
        self._parsing = parsing
        next(parsing, None)

    @property
    def is_complete(self) -> bool:
        """Whether the output has begun one more call than the maximum."""
        return self._reader.is_full

    def feed(self, text: str) -> Sequence[Piece]:
        """Parse more text; returns the pieces that are certain now."""
        self._reader.text += text
        next(self._parsing, None)
        return self._reader.drain()

    def finish(self) -> Sequence[Piece]:
        """The pieces of the text that was withheld, since no more text follows."""
        self._reader.is_ended = True
        next(self._parsing, None)
        return self._reader.drain()


class MessageParser(GeneratorParser):
    """Parses the output of one choice.

    Reasoning is recognised only at the start of the output; `is_reasoning` says that the prompt
    has opened it. Once only content can follow, text is returned unchanged.
    """

    def __init__(
        self,
        reader: TextReader,
        marks: ReasoningMarkers | None,
        parse_output: ParseOutput | None,
        tools: OfferedTools = MappingProxyType({}),
        *,
        is_reasoning: bool = False,
    ) -> None:
        self._marks = marks
        self._is_plain = False
        super().__init__(reader, self._read(parse_output, tools), is_reasoning=is_reasoning)

    def feed(self, text: str) -> Sequence[Piece]:
        """Parse more text; returns the pieces that are certain now."""
        if self._is_plain:
            return (text,) if text else ()
        return super().feed(text)

    def _read(self, parse_output: ParseOutput | None, tools: OfferedTools) -> Parsing[None]:
        reader = self._reader
        if self._marks is not None:
            yield from self._read_reasoning(self._marks)
        if parse_output is not None:
            yield from parse_output(reader, tools)
        elif not reader.is_ended:
            reader.emit(lambda text: text, len(reader.text))
            self._is_plain = True
        else:
            yield from emit_rest(reader)

    def _read_reasoning(self, marks: ReasoningMarkers) -> Parsing[None]:
        reader = self._reader
        if not self.is_reasoning and not (yield from reader.accept(marks.open + marks.label)):
            return
        self.is_reasoning = True
        yield from reader.skip_blanks()
        yield from reader.emit_until(Reasoning, marks.close)
        self.is_reasoning = False
        yield from reader.skip_blanks()
