"""Token ids to text deltas: whole characters only, and nothing that may yet become a stop string.

The joined deltas are the same however the tokens are cut into calls: the whole answer's bytes
decoded with "replace", up to the stop string that is complete first, or to its end where it is
to be shown. (Of several complete at the same character the longest counts.)
"""

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.ports import TokenDecoder


class ShowingDecoder:
    """A decoder that shows some control tokens, by their texts."""

    __slots__ = ("_decoder", "_shown")

    def __init__(self, decoder: "TokenDecoder", shown: Mapping[int, bytes]) -> None:
        self._decoder = decoder
        self._shown = shown

    def feed(self, token_id: int) -> bytes:
        return self._shown.get(token_id) or self._decoder.feed(token_id)


class TextStream:
    """The text of one answer. After a stop string it stays silent; `stopped` says which it was."""

    __slots__ = (
        "_decoder", "_firsts", "_held", "_pending", "_searches", "_shows_stop", "stopped",
    )  # fmt: skip

    def __init__(
        self, decoder: "TokenDecoder", stops: Sequence[str] = (), *, shows_stop: bool = False
    ) -> None:
        """`decoder` is fresh and no one else's. `stops` are not empty strings.

        The stop string that is met is the end of the text if `shows_stop`, else no part of it.
        """
        self._shows_stop = shows_stop
        self.stopped: str | None = None
        self._decoder = decoder
        self._pending = b""  # the beginning of a character
        self._held = ""  # the beginning of a stop string, or nothing
        self._searches = [_Search(stop) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was met."""
        return self.stopped is not None

    @property
    def num_held(self) -> int:
        """Characters that are known and not shown yet."""
        return len(self._held)

    @property
    def is_inside(self) -> bool:
        """Whether the tokens so far end in the middle of a character."""
        return bool(self._pending)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens add and that is certain to be shown."""
        if self.stopped is not None:
            return ""
        feed = self._decoder.feed
        data = feed(token_ids[0]) if len(token_ids) == 1 else b"".join(map(feed, token_ids))
        if data.isascii() and not self._pending:
            text = data.decode("ascii")
        else:
            text = self._decode(data, is_last=False)
        return self._cut(text) if self._searches else text

    def finish(self) -> str:
        """The rest: what was held, and U+FFFD for a character that never became whole."""
        if self.stopped is not None:
            return ""
        shown = self._cut(self._decode(b"", is_last=True))
        if self.stopped is None:
            shown += self._held
        self._held = ""
        return shown

    def _decode(self, data: bytes, *, is_last: bool) -> str:
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", is_last)
        self._pending = data[used:]
        return text

    def _cut(self, text: str) -> str:
        """What of the held text and `text` may be shown; holds the rest or throws it away."""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        known = self._held + text
        before = len(self._held)
        found = [
            (before + end, before + end - len(search.stop), search.stop)
            for search in self._searches
            if (end := search.feed(text)) is not None
        ]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return known[: end if self._shows_stop else start]
        keep = len(known) - max((search.matched for search in self._searches), default=0)
        self._held = known[keep:]
        return known[:keep]


class _Search:
    """Looks for one string in a text that comes in pieces (Knuth, Morris, Pratt 1977).

    `matched` is the length of the longest beginning of the string that the text ends with.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string would stop everything"
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def feed(self, text: str) -> int | None:
        """How many characters of `text` it took to complete the string, if they did."""
        stop, matched = self.stop, self.matched
        if not matched and stop[0] not in text:
            return None
        for place, char in enumerate(text):
            while matched and stop[matched] != char:
                matched = self._borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                return place + 1
        self.matched = matched
        return None


def _borders(word: str) -> list[int]:
    """For each beginning of `word`, the length of its longest proper beginning that ends it."""
    borders = [0] * len(word)
    length = 0
    for place in range(1, len(word)):
        while length and word[place] != word[length]:
            length = borders[length - 1]
        if word[place] == word[length]:
            length += 1
        borders[place] = length
    return borders
