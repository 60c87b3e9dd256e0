"""Bias, bans and penalties in numpy, for all rows of a batch at once, in vLLM's order.

A row's result does not depend on the other rows.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from engine.step import SampleSpec
from engine.worker.sampling.filters import Floats
from engine.worker.sampling.token_counts import (
    CountedTokens,
    Int64s,
    TokenCounts,
    output_counts,
    whole_counts,
)

Ids = tuple[int, ...]


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


def _prompt_ids(spec: SampleSpec) -> Ids:
    """The ids of the prompt; where they are counted, the lowest and the highest."""
    output = spec.output
    return output.counts.prompt_extremes if isinstance(output, CountedTokens) else spec.prompt


def _output_ids(spec: SampleSpec) -> Ids:
    """The ids of the output; where they are counted, the lowest and the highest."""
    output = spec.output
    return output.counts.output.extremes if isinstance(output, CountedTokens) else output


ID_FIELDS: dict[str, Callable[[SampleSpec], Ids]] = {
    "logit_bias": biased_ids,
    "banned": lambda spec: spec.banned,
    "prompt": _prompt_ids,
    "output": _output_ids,
    "end_ids": lambda spec: spec.end_ids,
}


def indices_of(rows: Sequence[int], ids: Sequence[Ids]) -> LogitIndices:
    """The indices of `ids[i]` in row `rows[i]`, for all i."""
    lengths = [len(some) for some in ids]
    flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=sum(lengths))
    return LogitIndices(np.repeat(np.array(rows, dtype=np.int64), lengths), flat)


def counted(
    rows: Sequence[int], counts: Sequence[TokenCounts | None]
) -> tuple[LogitIndices, Int64s]:
    """Each id of `counts[i]` once in row `rows[i]`, and how often it occurs; none for None."""
    found = [(row, each.distinct) for row, each in zip(rows, counts, strict=True) if each]
    if not found:
        nothing = np.zeros(0, dtype=np.int64)
        return LogitIndices(nothing, nothing), nothing
    lengths = [len(each.ids) for _, each in found]
    numbers = np.repeat(np.array([row for row, _ in found], dtype=np.int64), lengths)
    places = LogitIndices(numbers, np.concatenate([each.ids for _, each in found]))
    return places, np.concatenate([each.counts for _, each in found])


def seen_by_repetition(
    rows: Sequence[int], specs: Sequence[SampleSpec]
) -> tuple[LogitIndices, Int64s]:
    """The ids of prompt and output in the rows with a repetition penalty, as `counted` does."""
    return counted(
        rows,
        [
            whole_counts(s.prompt, s.output) if s.sampling.repetition_penalty != 1.0 else None
            for s in specs
        ],
    )


def seen_by_presence_and_frequency(
    rows: Sequence[int], specs: Sequence[SampleSpec]
) -> tuple[LogitIndices, Int64s]:
    """The ids of the output in the rows with one of these penalties, as `counted` does."""
    return counted(
        rows,
        [
            output_counts(s.output)
            if s.sampling.presence_penalty or s.sampling.frequency_penalty
            else None
            for s in specs
        ],
    )


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
    places, _ = seen_by_repetition(rows, specs)
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
    places, counts = seen_by_presence_and_frequency(rows, specs)
    each = _of_rows(values, rows, frequency)[places.rows] * counts.astype(np.float32)
    values[places] -= each + _of_rows(values, rows, presence)[places.rows]
