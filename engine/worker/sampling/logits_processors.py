"""Bias, bans and penalties in numpy, for all rows of a batch at once, in vLLM's order.

A row's result does not depend on the other rows.
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


class LogitIndices(NamedTuple):
    """Indices of logits: `values[rows, ids]`."""

    rows: Int64s
    ids: Int64s


def process(values: Floats, rows: Sequence[int], specs: Sequence[SampleSpec]) -> None:
    """Apply bias, bans and penalties to these rows of `[rows, vocab]` in place.

    All ids are in range.
    """
    _bias(values, rows, specs)
    banned = indices_of(rows, [spec.banned for spec in specs])
    values[banned] = -np.inf
    _repetition(values, rows, specs)
    _presence_and_frequency(values, rows, specs)


def invalid_id_fields(specs: Sequence[SampleSpec], vocab_size: int) -> dict[int, str]:
    """By index in `specs`, the first field that holds an id outside the vocabulary."""
    found: dict[int, str] = {}
    for name, read in ID_FIELDS.items():
        places = indices_of(range(len(specs)), [read(spec) for spec in specs])
        outside = (places.ids < 0) | (places.ids >= vocab_size)
        for place in np.unique(places.rows[outside]).tolist():
            found.setdefault(place, name)
    return found


def biased_ids(spec: SampleSpec) -> Ids:
    """The ids that have a bias, in order."""
    return tuple([token for token, _ in spec.sampling.logit_bias])


ID_FIELDS: dict[str, Callable[[SampleSpec], Ids]] = {
    "logit_bias": biased_ids,
    "banned": lambda spec: spec.banned,
    "prompt": lambda spec: spec.prompt,
    "output": lambda spec: spec.output,
    "end_ids": lambda spec: spec.end_ids,
}


def indices_of(rows: Sequence[int], ids: Sequence[Ids]) -> LogitIndices:
    """The indices of `ids[i]` in row `rows[i]`, for all i."""
    lengths = [len(some) for some in ids]
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=sum(lengths))
    return LogitIndices(np.repeat(np.array(rows, dtype=np.int64), lengths), flat)


def distinct(places: LogitIndices, vocab_size: int) -> tuple[LogitIndices, Int64s]:
    """Each index once, and how often it occurred."""
    keys, counts = np.unique(places.rows * vocab_size + places.ids, return_counts=True)
    return LogitIndices(*np.divmod(keys, vocab_size)), counts


def _of_rows(values: Floats, rows: Sequence[int], numbers: Sequence[float]) -> Floats:
    """A float32 for each row of `values`, 0 for rows not in `rows`."""
    table = np.zeros(len(values), dtype=np.float32)
    table[list(rows)] = numbers
    return table


def _bias(values: Floats, rows: Sequence[int], specs: Sequence[SampleSpec]) -> None:
    if any(spec.sampling.logit_bias for spec in specs):
        amounts = [amount for spec in specs for _, amount in spec.sampling.logit_bias]
        places = indices_of(rows, [biased_ids(spec) for spec in specs])
        np.add.at(values, places, np.array(amounts, dtype=np.float32))


def _repetition(values: Floats, rows: Sequence[int], specs: Sequence[SampleSpec]) -> None:
    """For ids in prompt or output: divide positive logits by the penalty, multiply others."""
    penalties = [spec.sampling.repetition_penalty for spec in specs]
    if all(penalty == 1.0 for penalty in penalties):
        return
    seen = [
        spec.prompt + spec.output if penalty != 1.0 else ()
        for spec, penalty in zip(specs, penalties, strict=True)
    ]
    places, _ = distinct(indices_of(rows, seen), values.shape[1])
    penalty = _of_rows(values, rows, penalties)[places.rows]
    found = values[places]
    values[places] = np.where(found > 0, found / penalty, found * penalty)


def _presence_and_frequency(
    values: Floats, rows: Sequence[int], specs: Sequence[SampleSpec]
) -> None:
    """For ids in the output: subtract `presence`, and `frequency` for each occurrence."""
    presence = [spec.sampling.presence_penalty for spec in specs]
    frequency = [spec.sampling.frequency_penalty for spec in specs]
    if not (any(presence) or any(frequency)):
        return
    output = [
        spec.output if once or each else ()
        for spec, once, each in zip(specs, presence, frequency, strict=True)
    ]
    places, counts = distinct(indices_of(rows, output), values.shape[1])
    each = _of_rows(values, rows, frequency)[places.rows] * counts.astype(np.float32)
    values[places] -= each + _of_rows(values, rows, presence)[places.rows]
