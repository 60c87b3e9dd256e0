"""Tokens beside their text: each is told in the moment in which the last of its text is shown."""

from collections import deque
from typing import TYPE_CHECKING

from gateway.schema.rendering import OutputToken

if TYPE_CHECKING:
    from engine.step import TokenLogprobs
    from gateway.generation.text import TextStream


class TokenText:
    """Reads tokens into a text, one by one, and keeps those whose text is still held."""

    def __init__(self, text: "TextStream", num_before: int = 0) -> None:
        """`num_before` characters of the choice were shown before this text."""
        self.num_shown = num_before  # characters of the choice
        self._text = text
        self._waiting: deque[tuple[int, OutputToken]] = deque()  # with the characters it waits for

    def feed(self, token_id: int, logprobs: "TokenLogprobs | None") -> str:
        """The text that is certain now, as `TextStream.feed` gives it."""
        offset = self.num_shown + self._text.num_held
        shown = self._text.feed((token_id,))
        self.num_shown += len(shown)
        end = self.num_shown + self._text.num_held + self._text.is_inside
        self._waiting.append((end, OutputToken(token_id, offset, logprobs)))
        return shown

    def finish(self) -> str:
        """The rest of the text."""
        shown = self._text.finish()
        self.num_shown += len(shown)
        return shown

    def due(self) -> list[OutputToken]:
        """Tokens whose text has been shown; call it after every token."""
        if self._text.is_stopped:
            return self.rest()
        told = []
        while self._waiting and self._waiting[0][0] <= self.num_shown:
            told.append(self._waiting.popleft()[1])
        return told

    def rest(self) -> list[OutputToken]:
        """Once the text is finished, or cut: the tokens of which something was shown."""
        waiting = [drawn for _, drawn in self._waiting]
        self._waiting.clear()
        if self._text.is_stopped:
            return [drawn for drawn in waiting if drawn.offset < self.num_shown]
        return waiting
