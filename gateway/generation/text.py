"""Incremental detokenization: whole characters only, and no prefix of a possible stop string.

The joined deltas do not depend on how the tokens are split into calls: they are the output's
bytes decoded with "replace", up to the stop string that is completed first (including it if it is
to be part of the text). If several are completed at the same character, the longest counts.
"""

from codecs import utf_8_decode
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

from engine.step import TokenLogprobs
from gateway.ports import TokenDecoder
from gateway.schema.rendering import OutputToken


class SpecialTokenDecoder:
    """A decoder that writes some control tokens as text."""

    __slots__ = ("_decoder", "_visible_tokens")

    def __init__(self, decoder: TokenDecoder, visible_tokens: Mapping[int, bytes]) -> None:
        self._decoder = decoder
        self._visible_tokens = visible_tokens

    def feed(self, token_id: int) -> bytes:
        return self._visible_tokens.get(token_id) or self._decoder.feed(token_id)


class TextStream:
    """The text of one choice. After a stop string (`matched_stop`) it returns no more text."""

    __slots__ = (
        "_buffer", "_decoder", "_first_chars", "_includes_stop", "_partial_bytes", "_searches",
        "matched_stop",
    )  # fmt: skip

    def __init__(
        self,
        decoder: TokenDecoder,
        stop_strings: Sequence[str] = (),
        *,
        includes_stop: bool = False,
    ) -> None:
        """`decoder` is fresh and used by this stream only. No stop string is empty.

        The matched stop string is the end of the text if `includes_stop`, else it is cut off.
        """
        self._includes_stop = includes_stop
        self.matched_stop: str | None = None
        self._decoder = decoder
        self._partial_bytes = b""  # an incomplete UTF-8 character
        self._buffer = ""  # the longest suffix that is a prefix of a stop string
        self._searches = [_Search(stop) for stop in stop_strings]
        self._first_chars = frozenset(stop[0] for stop in stop_strings)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was matched."""
        return self.matched_stop is not None

    @property
    def num_buffered(self) -> int:
        """Characters that are decoded and not returned yet."""
        return len(self._buffer)

    @property
    def is_mid_character(self) -> bool:
        """Whether the tokens so far end in the middle of a character."""
        return bool(self._partial_bytes)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add and that no later stop string can remove."""
        if self.matched_stop is not None:
            return ""
        feed = self._decoder.feed
        data = feed(token_ids[0]) if len(token_ids) == 1 else b"".join(map(feed, token_ids))
        if data.isascii() and not self._partial_bytes:
            text = data.decode("ascii")
        else:
            text = self._decode(data, is_last=False)
        return self._cut(text) if self._searches else text

    def finish(self) -> str:
        """The rest: the buffer, and U+FFFD for a character that stayed incomplete."""
        if self.matched_stop is not None:
            return ""
        visible = self._cut(self._decode(b"", is_last=True))
        if self.matched_stop is None:
            visible += self._buffer
        self._buffer = ""
        return visible

    def _decode(self, data: bytes, *, is_last: bool) -> str:
        data = self._partial_bytes + data
        text, used = utf_8_decode(data, "replace", is_last)
        self._partial_bytes = data[used:]
        return text

    def _cut(self, text: str) -> str:
        """The part of buffer + `text` that may be returned; buffers the rest or discards it."""
        if not self._buffer and self._first_chars.isdisjoint(text):
            return text
        known = self._buffer + text
        before = len(self._buffer)
        found = [
            (before + end, before + end - len(search.stop), search.stop)
            for search in self._searches
            if (end := search.feed(text)) is not None
        ]
        if found:
            end, start, self.matched_stop = min(found)
            self._buffer = ""
            return known[: end if self._includes_stop else start]
        keep = len(known) - max((search.matched for search in self._searches), default=0)
        self._buffer = known[keep:]
        return known[:keep]


class TokenText:
    """Feeds tokens to a `TextStream` one by one, and reports each once its text is visible."""

    def __init__(self, text: TextStream) -> None:
        self.num_visible = 0  # characters of the choice, an echoed prompt included
        self._text = text
        self._waiting: deque[tuple[int, OutputToken]] = deque()  # with the characters needed

    def feed(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
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


class _Search:
    """Searches for one string in a text that arrives in pieces (Knuth, Morris, Pratt 1977).

    `matched` is the length of the longest prefix of the string that the text so far ends with.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop, "stop strings are checked to be non-empty"
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def feed(self, text: str) -> int | None:
        """The number of characters of `text` up to the end of the first match, or None."""
        stop, matched = self.stop, self.matched
        if not matched and stop[0] not in text:
            return None
        for i, char in enumerate(text):
            while matched and stop[matched] != char:
                matched = self._borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                return i + 1
        self.matched = matched
        return None


@lru_cache(64)
def _borders(word: str) -> Sequence[int]:
    """The length of the longest proper prefix that is a suffix, for each prefix of `word`.

    The choices of a request, which have the same stop strings, share these tables.
    """
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        if word[i] == word[length]:
            length += 1
        borders[i] = length
    return borders
