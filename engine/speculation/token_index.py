"""TokenIndex: finds where the last tokens of a text occurred before.

The positions of each run of `gram` tokens are chained, the latest first, so a lookup is a
dictionary access, and the comparison of the tokens before the run at a few positions. Adding a
token takes about half a microsecond.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

END = -1  # fixed: the token between two texts; it equals no token of a text
TRIES = 16  # positions that are compared per lookup; swept in results/constants
_BITS = 32  # fixed: the size of a token id


class Match(NamedTuple):
    """The longest common suffix found: its length, and the positions of its last token."""

    length: int
    ends: list[int]


NO_MATCH = Match(0, [])


class TokenIndex:
    """A growing sequence of tokens, indexed by runs of `gram` tokens."""

    def __init__(self, gram: int) -> None:
        self.tokens: list[int] = []
        self._gram = gram
        self._mask = (1 << _BITS * gram) - 1
        self._key = 0  # the hash of the last `gram` tokens
        self._latest: dict[int, int] = {}  # position of the run's last token
        self._before = array("i")  # position of the same run before, by position

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        key, mask, latest, before = self._key, self._mask, self._latest, self._before
        position = len(self.tokens)
        for token in tokens:
            key = (key << _BITS | token + 1) & mask
            before.append(latest.get(key, -1))
            latest[key] = position
            self.tokens.append(token)
            position += 1
        self._key = key

    def tail(self, most: int) -> list[int]:
        """The last tokens, at most so many, of the last text."""
        tail = self.tokens[-most:]
        while END in tail:
            del tail[: tail.index(END) + 1]
        return tail

    def find(self, tail: Sequence[int], tries: int = TRIES) -> Match:
        """Where the longest suffix of `tail` occurs, of at least `gram` tokens; the latest position
        first. The end of this sequence itself is not reported. With fewer `tries`, fewer positions
        at which all of `tail` occurs are reported."""
        gram, tokens, most = self._gram, self.tokens, len(tail)
        if most < gram:
            return NO_MATCH
        key = 0
        for token in tail[-gram:]:
            key = key << _BITS | token + 1
        end, own = self._latest.get(key, -1), len(tokens) - 1
        best, ends = 0, list[int]()
        for _ in range(TRIES):
            if end < gram - 1 or (best == most and len(ends) >= tries):
                break
            if end != own:
                length = most if tokens[max(0, end + 1 - most) : end + 1] == tail else gram
                while length < min(most, end + 1) and tokens[end - length] == tail[-1 - length]:
                    length += 1
                if length > best:
                    best, ends = length, [end]
                elif length == best:
                    ends.append(end)
            end = self._before[end]
        return Match(best, ends)

    def follow(self, end: int, count: int) -> list[int]:
        """Up to `count` tokens behind position `end`, up to the end of their text.

        Behind the last token of the sequence, they are repeated: as in LZ77, a copy may overlap
        what it produces.
        """
        copied = self.tokens[end + 1 : end + 1 + count]
        if END in copied:
            return copied[: copied.index(END)]
        while copied and len(copied) < count:
            copied += copied[: count - len(copied)]
        return copied
