"""The `StreamParser` port: reasoning first, then content and tool calls, as a dialect says."""

from collections.abc import Container, Sequence
from typing import NamedTuple

from adapters.dialects.reader import Reads, TextReader
from adapters.dialects.tool_calls import ReadAnswer, pour_rest
from gateway.ports import Piece, Reasoning


class Marks(NamedTuple):
    """What stands around a model's reasoning."""

    open: str
    close: str


class MessageParser:
    """Reads one answer.

    Reasoning is looked for at the very beginning only, `is_reasoning` where the prompt opened it.
    Once nothing can come but content, text passes straight through.
    """

    def __init__(
        self,
        reader: TextReader,
        marks: Marks | None,
        read_answer: ReadAnswer | None,
        names: Container[str] = (),
        *,
        is_reasoning: bool = False,
    ) -> None:
        self.is_reasoning = is_reasoning
        self._reader = reader
        self._marks = marks
        self._reading = self._read(read_answer, names)
        self._is_plain = False
        self._go_on()

    @property
    def is_complete(self) -> bool:
        """Whether as many calls as were wanted have been made, and one more would begin."""
        return self._reader.is_full

    def feed(self, text: str) -> Sequence[Piece]:
        """The pieces that are certain now."""
        if self._is_plain:
            return (text,) if text else ()
        self._reader.text += text
        self._go_on()
        return self._reader.drain()

    def finish(self) -> Sequence[Piece]:
        """What was held."""
        self._reader.is_ended = True
        if not self._is_plain:
            self._go_on()
        return self._reader.drain()

    def _go_on(self) -> None:
        next(self._reading, None)

    def _read(self, read_answer: ReadAnswer | None, names: Container[str]) -> Reads[None]:
        reader = self._reader
        if self._marks is not None:
            yield from self._read_reasoning(self._marks)
        if read_answer is not None:
            yield from read_answer(reader, names)
        elif not reader.is_ended:
            reader.say(lambda text: text, len(reader.text))
            self._is_plain = True
        else:
            yield from pour_rest(reader)

    def _read_reasoning(self, marks: Marks) -> Reads[None]:
        reader = self._reader
        if not self.is_reasoning and not (yield from reader.accept(marks.open)):
            return
        self.is_reasoning = True
        yield from reader.skip_blanks()
        yield from reader.pour(Reasoning, marks.close)
        self.is_reasoning = False
        yield from reader.skip_blanks()
