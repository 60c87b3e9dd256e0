"""Output tokens with their text offsets: each is reported once all of its text is visible."""

from collections import deque
from typing import TYPE_CHECKING

from gateway.schema.rendering import OutputToken

if TYPE_CHECKING:
    from engine.step import TokenLogprobs
    from gateway.generation.text import TextStream


class TokenText:
    """Feeds tokens to a `TextStream` one by one and keeps those whose text is still buffered."""

    def __init__(self, text: "TextStream") -> None:
        self.num_visible = 0  # characters of the choice, an echoed prompt included
        self._text = text
        self._waiting: deque[tuple[int, OutputToken]] = deque()  # with the characters needed

    def feed(self, token_id: int, logprobs: "TokenLogprobs | None") -> str:
        """The text that becomes visible, as `TextStream.feed` returns it."""
        offset = self.num_visible + self._text.num_buffered
        visible = self._text.feed((token_id,))
        self.num_visible += len(visible)
        end = self.num_visible + self._text.num_buffered + self._text.is_mid_character
        self._waiting.append((end, OutputToken(token_id, offset, logprobs)))
        return visible

    def finish(self) -> str:
        """The rest of the text."""
        visible = self._text.finish()
        self.num_visible += len(visible)
        return visible

    def take_due(self) -> list[OutputToken]:
        """The tokens whose text has become visible; call it after every token."""
        if self._text.is_stopped:
            return self.take_rest()
        due = []
        while self._waiting and self._waiting[0][0] <= self.num_visible:
            due.append(self._waiting.popleft()[1])
        return due

    def take_rest(self) -> list[OutputToken]:
        """After the text has finished or was cut: the remaining tokens with any visible text."""
        waiting = [token for _, token in self._waiting]
        self._waiting.clear()
        if self._text.is_stopped:
            return [token for token in waiting if token.offset < self.num_visible]
        return waiting
