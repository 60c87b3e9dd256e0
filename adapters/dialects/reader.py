"""TextReader: streamed text for parsers that are written as generators.

A dialect's parser is a generator over one reader; each `yield` waits for more text. The result
depends on the text alone and not on how it was split.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from gateway.ports import CallArguments, CallBegin, Piece

T = TypeVar("T")
Parsing = Generator[None, None, T]  # each `yield` waits for text; the parser returns T


class TextReader:
    """The unread text, and the pieces emitted so far.

    `is_full` becomes true when a call beyond `max_calls` begins; no pieces are emitted after that.
    """

    def __init__(self, new_id: Callable[[], str], max_calls: int | None = None) -> None:
        """`new_id` returns the id of a new tool call."""
        self.is_full = False
        self.text = ""
        self.skipped = ""  # taken since the last call or mark, and not part of any piece
        self.is_ended = False  # no more text follows
        self.num_calls = 0
        self._new_id = new_id
        self._max_calls = max_calls
        self._pieces: list[Piece] = []

    def drain(self) -> list[Piece]:
        """Return and remove the emitted pieces."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, size: int) -> str:
        """Remove and return the next `size` characters, which must have arrived."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def emit(self, make: Callable[[str], Piece], size: int) -> None:
        """Take the next `size` characters and emit them as a piece, unless there are none."""
        if (text := self.take(size)) and not self.is_full:
            self._pieces.append(make(text))

    def begin_call(self, name: str, arguments: str = "") -> None:
        """Emit the beginning of a tool call, with the arguments that are known."""
        if self.num_calls == self._max_calls:
            self.is_full = True
            return
        self._pieces.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        if arguments:
            self.emit_arguments(arguments)

    def emit_arguments(self, arguments: str) -> None:
        """Emit more arguments of the latest call."""
        if self.is_full:
            return
        self._pieces.append(CallArguments(self.num_calls - 1, arguments))

    def unskip(self) -> None:
        """Put the skipped text back to be read as content."""
        self.text, self.skipped = self.skipped + self.text, ""

    def skip_blanks(self) -> Parsing[None]:
        """Skip whitespace up to another character or the end."""
        while True:
            self.text = self.text.lstrip()
            if self.text or self.is_ended:
                return
            yield

    def peek(self) -> Parsing[str]:
        """The first character that is not whitespace, or "" at the end; takes nothing."""
        while True:
            rest = self.text.lstrip()
            if rest or self.is_ended:
                return rest[:1]
            yield

    def accept(self, mark: str) -> Parsing[bool]:
        """Take `mark` and the whitespace before it if it comes next; otherwise take nothing."""
        while True:
            rest = self.text.lstrip()
            if rest.startswith(mark):
                self.skipped += self.take(len(self.text) - len(rest) + len(mark))
                return True
            if self.is_ended or not mark.startswith(rest):
                return False
            yield

    def emit_until(self, make: Callable[[str], Piece], mark: str) -> Parsing[bool]:
        """Emit all text up to `mark` and take the mark; False if the text ends without it.

        Whitespace before the mark, and at the end of the text after a call, is not emitted.
        """
        while (at := self.text.find(mark)) < 0:
            if self.is_ended:
                size = len(self.text)
                if self.num_calls and not self.text.strip():
                    self.take(size)
                self.emit(make, size)
                return False
            self.emit(make, len(self.text) - num_withheld(self.text, mark))
            yield
        size = len(self.text[:at].rstrip())
        self.emit(make, size)
        self.skipped = self.take(at - size + len(mark))
        return True


def num_withheld(text: str, mark: str) -> int:
    """The length of the end of `text` that may be part of `mark` or whitespace before it."""
    size = next(
        (
            size
            for size in range(min(len(mark) - 1, len(text)), 0, -1)
            if mark[:size] == text[-size:]
        ),
        0,
    )
    before = text[: len(text) - size]
    return len(text) - len(before.rstrip())
