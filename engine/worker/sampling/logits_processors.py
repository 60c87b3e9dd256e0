"""Bias, bans and penalties in numpy, for all rows of a batch at once; the order is vLLM's.

What is done to a row does not depend on the others: only the loops over rows are gone.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.step import SampleSpec
from engine.worker.sampling.filters import Floats

Ids = tuple[int, ...]
Int64s = NDArray[np.int64]


class Places(NamedTuple):
    """Places of logits: `values[rows, ids]`."""

    rows: Int64s
    ids: Int64s


def process(values: Floats, rows: Sequence[int], draws: Sequence[SampleSpec]) -> None:
    """Apply the draws to these rows of `[rows, vocab]`, in place; all ids are in range."""
    _bias(values, rows, draws)
    banned = places_of(rows, [draw.banned for draw in draws])
    values[banned] = -np.inf
    _repetition(values, rows, draws)
    _presence_and_frequency(values, rows, draws)


def strangers(draws: Sequence[SampleSpec], vocab_size: int) -> dict[int, str]:
    """By place in `draws`, the first field that holds an id outside the vocabulary."""
    found: dict[int, str] = {}
    for name, read in ID_FIELDS.items():
        places = places_of(range(len(draws)), [read(draw) for draw in draws])
        outside = (places.ids < 0) | (places.ids >= vocab_size)
        for place in np.unique(places.rows[outside]).tolist():
            found.setdefault(place, name)
    return found


def biased(draw: SampleSpec) -> Ids:
    """The ids of its bias, in order."""
    return tuple([token for token, _ in draw.sampling.logit_bias])


ID_FIELDS: dict[str, Callable[[SampleSpec], Ids]] = {
    "logit_bias": biased,
    "banned": lambda draw: draw.banned,
    "prompt": lambda draw: draw.prompt,
    "output": lambda draw: draw.output,
    "end_ids": lambda draw: draw.end_ids,
}


def places_of(rows: Sequence[int], ids: Sequence[Ids]) -> Places:
    """`ids[i]` in row `rows[i]`, for all i."""
    lengths = [len(some) for some in ids]
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=sum(lengths))
    return Places(np.repeat(np.array(rows, dtype=np.int64), lengths), flat)


def distinct(places: Places, vocab_size: int) -> tuple[Places, Int64s]:
    """Each place once, and how often it was there."""
    keys, counts = np.unique(places.rows * vocab_size + places.ids, return_counts=True)
    return Places(*np.divmod(keys, vocab_size)), counts


def _of_rows(values: Floats, rows: Sequence[int], numbers: Sequence[float]) -> Floats:
    """A float32 for each row of `values`, 0 for those not among `rows`."""
    table = np.zeros(len(values), dtype=np.float32)
    table[list(rows)] = numbers
    return table


def _bias(values: Floats, rows: Sequence[int], draws: Sequence[SampleSpec]) -> None:
    if any(draw.sampling.logit_bias for draw in draws):
        amounts = [amount for draw in draws for _, amount in draw.sampling.logit_bias]
        places = places_of(rows, [biased(draw) for draw in draws])
        np.add.at(values, places, np.array(amounts, dtype=np.float32))


def _repetition(values: Floats, rows: Sequence[int], draws: Sequence[SampleSpec]) -> None:
    """Over prompt and output: positive logits are divided, others multiplied."""
    penalties = [draw.sampling.repetition_penalty for draw in draws]
    if all(penalty == 1.0 for penalty in penalties):
        return
    seen = [
        draw.prompt + draw.output if penalty != 1.0 else ()
        for draw, penalty in zip(draws, penalties, strict=True)
    ]
    places, _ = distinct(places_of(rows, seen), values.shape[1])
    penalty = _of_rows(values, rows, penalties)[places.rows]
    found = values[places]
    values[places] = np.where(found > 0, found / penalty, found * penalty)


def _presence_and_frequency(
    values: Floats, rows: Sequence[int], draws: Sequence[SampleSpec]
) -> None:
    """Over the output: a fixed amount for each token that is there, and one per occurrence."""
    presence = [draw.sampling.presence_penalty for draw in draws]
    frequency = [draw.sampling.frequency_penalty for draw in draws]
    if not (any(presence) or any(frequency)):
        return
    output = [
        draw.output if once or each else ()
        for draw, once, each in zip(draws, presence, frequency, strict=True)
    ]
    places, counts = distinct(places_of(rows, output), values.shape[1])
    each = _of_rows(values, rows, frequency)[places.rows] * counts.astype(np.float32)
    values[places] -= each + _of_rows(values, rows, presence)[places.rows]
