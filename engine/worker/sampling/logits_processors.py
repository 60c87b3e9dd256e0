"""Bias, bans and penalties for all rows of a batch at once, in vLLM's order.

A row's result does not depend on the other rows.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
NO_NUMBERS: Floats = np.zeros(0, dtype=np.float32)
Put = Callable[[NDArray[Any]], Tensor]  # copies to where the logits are, without waiting


class LogitIndices(NamedTuple):
    """Indices of logits: `values[rows, ids]`."""

    rows: Int64s
    ids: Int64s


def process(logits: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec], put: Put) -> None:
    """Apply bias, bans and penalties to these rows of `[rows, vocab]` in place.

    All ids are in range. The host prepares positions and amounts, which `put` copies to the logits'
    device in one piece each; it reads nothing back.
    """
    width = logits.shape[1]
    edits = [
        _Edit(_add, *_bias(rows, specs, width)),
        _Edit(_ban, indices_of(rows, [spec.banned for spec in specs]), NO_NUMBERS),
        _Edit(_penalize, *_repetition(rows, specs)),
        _Edit(_add, *_presence_and_frequency(rows, specs)),
    ]
    edits = [edit for edit in edits if len(edit.places.rows)]
    if not edits:
        return
    flat = [edit.places.rows * width + edit.places.ids for edit in edits]
    sizes, counts = [len(each) for each in flat], [len(edit.numbers) for edit in edits]
    places = torch.split(put(np.concatenate(flat)), sizes)
    numbers = torch.split(put(np.concatenate([edit.numbers for edit in edits])), counts)
    for edit, at, amounts in zip(edits, places, numbers, strict=True):
        edit.apply(logits.view(-1), at, amounts)


class _Edit(NamedTuple):
    """A change of some logits, and the number that belongs to each of them."""

    apply: Callable[[Tensor, Tensor, Tensor], object]
    places: LogitIndices
    numbers: Floats


def _add(logits: Tensor, at: Tensor, amounts: Tensor) -> None:
    logits.index_add_(0, at, amounts)


def _ban(logits: Tensor, at: Tensor, _: Tensor) -> None:
    logits.index_fill_(0, at, -torch.inf)


def _penalize(logits: Tensor, at: Tensor, penalties: Tensor) -> None:
    """Divide positive logits by the penalty, multiply others."""
    scores = logits.index_select(0, at)
    scores = torch.where(scores > 0, scores / penalties, scores * penalties)
    logits.index_copy_(0, at, scores)


def invalid_id_fields(specs: Sequence[SampleSpec], vocab_size: int) -> dict[int, str]:
    """The first field, by index in `specs`, that holds an id outside the vocabulary."""
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


def _of_rows(rows: Sequence[int], numbers: Sequence[float], places: LogitIndices) -> Floats:
    """The number of each position's row."""
    table = np.zeros(max(rows) + 1, dtype=np.float32)
    table[list(rows)] = numbers
    found: Floats = table[places.rows]
    return found


def _bias(
    rows: Sequence[int], specs: Sequence[SampleSpec], vocab_size: int
) -> tuple[LogitIndices, Floats]:
    """Each biased position once, with the sum of its biases."""
    places = indices_of(rows, [biased_ids(spec) for spec in specs])
    amounts = [amount for spec in specs for _, amount in spec.sampling.logit_bias]
    if not amounts:
        return places, NO_NUMBERS
    keys, inverse = np.unique(places.rows * vocab_size + places.ids, return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.float32)
    np.add.at(sums, inverse, np.array(amounts, dtype=np.float32))
    return LogitIndices(*np.divmod(keys, vocab_size)), sums


def _repetition(rows: Sequence[int], specs: Sequence[SampleSpec]) -> tuple[LogitIndices, Floats]:
    """The ids of prompt and output, whose positive logits are divided by the penalty; others are
    multiplied by it."""
    places, _ = seen_by_repetition(rows, specs)
    if not len(places.rows):
        return places, NO_NUMBERS
    return places, _of_rows(rows, [spec.sampling.repetition_penalty for spec in specs], places)


def _presence_and_frequency(
    rows: Sequence[int], specs: Sequence[SampleSpec]
) -> tuple[LogitIndices, Floats]:
    """The ids of the output, with what is added to their logits: minus `presence`, and minus
    `frequency` for each occurrence."""
    places, counts = seen_by_presence_and_frequency(rows, specs)
    if not len(counts):
        return places, NO_NUMBERS
    frequency = _of_rows(rows, [spec.sampling.frequency_penalty for spec in specs], places)
    presence = _of_rows(rows, [spec.sampling.presence_penalty for spec in specs], places)
    return places, -(frequency * counts.astype(np.float32) + presence)
