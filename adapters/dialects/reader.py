"""Reader: a text that comes in pieces, read by a program as if it were there.

Dialects are generators over one reader: each `yield` waits for more text. What they take is
decided by the text alone and never by how it was cut, so the pieces join to the same message.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from gateway.ports import CallArguments, CallBegin, Piece

T = TypeVar("T")
Reads = Generator[None, None, T]  # waits at each `yield`, returns T in the end


class TextReader:
    """The text that is not read yet, and the pieces made of what is.

    `is_full` from the call on that would be one more than `max_calls`: no pieces are made then.
    """

    def __init__(self, new_id: Callable[[], str], max_calls: int | None = None) -> None:
        """`new_id` names a tool call."""
        self.is_full = False
        self.text = ""
        self.passed = ""  # taken since the last call or mark, and part of no piece yet
        self.is_ended = False  # there will be no more text
        self.num_calls = 0
        self._new_id = new_id
        self._max_calls = max_calls
        self._pieces: list[Piece] = []

    def drain(self) -> list[Piece]:
        """The pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, size: int) -> str:
        """The next characters, which are there."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def say(self, make: Callable[[str], Piece], size: int) -> None:
        """Make a piece of the next characters, unless there are none."""
        if (text := self.take(size)) and not self.is_full:
            self._pieces.append(make(text))

    def call(self, name: str, arguments: str = "") -> None:
        """A tool call begins; `arguments` is what is known of them."""
        if self.num_calls == self._max_calls:
            self.is_full = True
            return
        self._pieces.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        if arguments:
            self.argue(arguments)

    def argue(self, arguments: str) -> None:
        """More arguments of the call that began last."""
        if self.is_full:
            return
        self._pieces.append(CallArguments(self.num_calls - 1, arguments))

    def unread(self) -> None:
        """Put back what was passed over: it was not what it seemed."""
        self.text, self.passed = self.passed + self.text, ""

    def skip_blanks(self) -> Reads[None]:
        """Pass over white space; afterwards comes something else, or nothing."""
        while True:
            self.text = self.text.lstrip()
            if self.text or self.is_ended:
                return
            yield

    def peek(self) -> Reads[str]:
        """The first character that is no white space, or "" at the end; takes nothing."""
        while True:
            rest = self.text.lstrip()
            if rest or self.is_ended:
                return rest[:1]
            yield

    def accept(self, mark: str) -> Reads[bool]:
        """Take `mark` if it comes next, after white space; else take nothing."""
        while True:
            rest = self.text.lstrip()
            if rest.startswith(mark):
                self.passed += self.take(len(self.text) - len(rest) + len(mark))
                return True
            if self.is_ended or not mark.startswith(rest):
                return False
            yield

    def pour(self, make: Callable[[str], Piece], mark: str) -> Reads[bool]:
        """Make pieces of all text up to `mark`, and take the mark; False: it never came.

        White space before the mark, and at the very end after a call, is no part of the pieces.
        """
        while (at := self.text.find(mark)) < 0:
            if self.is_ended:
                size = len(self.text)
                if self.num_calls and not self.text.strip():
                    self.take(size)
                self.say(make, size)
                return False
            self.say(make, len(self.text) - held(self.text, mark))
            yield
        size = len(self.text[:at].rstrip())
        self.say(make, size)
        self.passed = self.take(at - size + len(mark))
        return True


def held(text: str, mark: str) -> int:
    """Characters at the end of `text` that may yet belong to `mark`, white space before it too."""
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
