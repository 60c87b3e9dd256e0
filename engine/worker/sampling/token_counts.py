"""How often each id occurs in a request's tokens, kept from step to step.

Penalties need the distinct ids of prompt and output and their numbers. To count them again in each
step would take time in proportion to all outputs of the batch.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class DistinctIds(NamedTuple):
    """Each id once, in any order, and how often it occurs, at least once."""

    ids: Int64s
    counts: Int64s


class TokenCounts:
    """The numbers of occurrences of ids, which are added and removed one by one."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        ids, counts = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
        self._places = {token: place for place, token in enumerate(ids.tolist())}
        self._ids = ids
        self._counts = counts.astype(np.int64)
        self._has_zeros = False  # whether ids were removed and left zeros
        self.extremes: tuple[int, ...] = (int(ids[0]), int(ids[-1])) if len(ids) else ()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def distinct(self) -> DistinctIds:
        """The ids that occur. The arrays change with the next call of `add` or `remove`."""
        size = len(self._places)
        ids, counts = self._ids[:size], self._counts[:size]
        if self._has_zeros:
            occurs = counts > 0
            ids, counts = ids[occurs], counts[occurs]
        return DistinctIds(ids, counts)

    def add(self, tokens: Iterable[int]) -> None:
        """Count these tokens."""
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                place = self._append(token)
            self._counts[place] += 1

    def remove(self, tokens: Iterable[int]) -> None:
        """Forget these tokens, which were counted."""
        for token in tokens:
            self._counts[self._places[token]] -= 1
            self._has_zeros = True

    def _append(self, token: int) -> int:
        place = self._places[token] = len(self._places)
        if place == len(self._ids):
            more = max(64, place)
            self._ids = np.concatenate((self._ids, np.zeros(more, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(more, dtype=np.int64)))
        self._ids[place] = token
        self.extremes = (
            (min(token, *self.extremes), max(token, *self.extremes)) if place else (token,)
        )
        return place


class PenaltyCounts:
    """The counts of a request's output, and of its prompt and output together.

    Only what `sampling` reads is counted; the output grows, and may be cut before it grows again.
    """

    def __init__(self, prompt: tuple[int, ...], *, counts_prompt: bool) -> None:
        self.output = TokenCounts()
        self.whole = TokenCounts(prompt) if counts_prompt else None
        self.prompt_extremes = self.whole.extremes if self.whole is not None else ()
        self._tokens: tuple[int, ...] = ()  # the output that is counted

    def follow(self, output: tuple[int, ...], num_kept: int) -> "CountedTokens":
        """Count `output`, of which at least `num_kept` tokens are those of the last one."""
        dropped = self._tokens[num_kept:]
        added = output[min(num_kept, len(self._tokens)) :]
        for counts in (self.output, self.whole):
            if counts is not None:
                counts.remove(dropped)
                counts.add(added)
        self._tokens = output
        counted = CountedTokens(output)
        counted.counts = self
        return counted


class CountedTokens(tuple[int, ...]):
    """An output whose ids are counted; `counts` are those of the step that the output is for."""

    counts: PenaltyCounts


def output_counts(output: tuple[int, ...]) -> TokenCounts:
    """The counts of an output, which may be known."""
    return output.counts.output if isinstance(output, CountedTokens) else TokenCounts(output)


def whole_counts(prompt: tuple[int, ...], output: tuple[int, ...]) -> TokenCounts:
    """The counts of prompt and output, which may be known."""
    if isinstance(output, CountedTokens) and output.counts.whole is not None:
        return output.counts.whole
    return TokenCounts(prompt + output)
