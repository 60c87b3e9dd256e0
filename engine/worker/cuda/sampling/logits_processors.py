"""Logits processors on the device: grammar masks, logit bias, banned tokens and penalties.

The same as `engine.worker.sampling.logits_processors` does in numpy. The host prepares lists of
positions and amounts and uploads them in one piece each; it reads nothing back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import Mask
from engine.step import SampleSpec
from engine.worker.cuda.sampling.sampling_kernels import Put
from engine.worker.sampling.logits_processors import (
    LogitIndices,
    biased_ids,
    indices_of,
    seen_by_presence_and_frequency,
    seen_by_repetition,
)
from engine.worker.sampling.sampler import RowFault

Bools = NDArray[np.bool_]


def permitted(mask: Mask, spec: SampleSpec, vocab_size: int) -> tuple[Bools, SampleSpec]:
    """The ids that the grammar allows, and the row without bans that would leave no token.

    Raises `RowFault` if the grammar allows no token.
    """
    bits = np.unpackbits(np.frombuffer(mask.bits, dtype=np.uint8), bitorder="little")
    allowed = bits[:vocab_size].astype(np.bool_)
    if mask.accepts:
        allowed[list(spec.end_ids)] = True
    if not allowed.any():
        raise RowFault("its grammar allows no token here", is_caller_error=True)
    if spec.banned and mask.accepts:
        left = allowed.copy()
        left[list(spec.banned)] = False
        if not left.any():
            return allowed, spec._replace(banned=tuple(set(spec.banned) - set(spec.end_ids)))
    return allowed, spec


@dataclass(slots=True)
class _UploadedEdits:
    """Arrays of one dtype, uploaded as one array and split again on the device."""

    dtype: type[np.generic]
    parts: list[NDArray[Any]] = field(default_factory=list)

    def load(self, numbers: NDArray[Any]) -> None:
        self.parts.append(numbers.astype(self.dtype, copy=False))

    def send(self, put: Put) -> list[Tensor]:
        sizes = [len(part) for part in self.parts]
        return list(torch.split(put(np.concatenate(self.parts)), sizes))


def edit(
    logits: Tensor, specs: Mapping[int, SampleSpec], allowed: Mapping[int, Bools], put: Put
) -> None:
    """Apply logits processors to these rows of `[rows, vocab]` float32 in place, in vLLM's
    order."""
    if allowed:
        _forbid(logits, allowed, put)
    rows, some, vocab = list(specs), list(specs.values()), logits.shape[1]
    bias, amounts = _bias(rows, some, vocab)
    seen, penalties = _repetition(rows, some)
    generated, costs = _presence_and_frequency(rows, some)
    places, numbers = _UploadedEdits(np.int64), _UploadedEdits(np.float32)
    for one in (bias, indices_of(rows, [spec.banned for spec in some]), seen, generated):
        places.load(one.rows * vocab + one.ids)
    for each in (amounts, penalties, costs):
        numbers.load(each)
    at_bias, at_bans, at_seen, at_told = places.send(put)
    by_bias, by_penalty, by_costs = numbers.send(put)
    flat = logits.view(-1)
    flat.index_add_(0, at_bias, by_bias)
    flat.index_fill_(0, at_bans, -torch.inf)
    found = flat.index_select(0, at_seen)
    flat.index_copy_(0, at_seen, torch.where(found > 0, found / by_penalty, found * by_penalty))
    flat.index_add_(0, at_told, by_costs.neg())


def _forbid(logits: Tensor, allowed: Mapping[int, Bools], put: Put) -> None:
    rows = put(np.array(list(allowed), dtype=np.int64))
    packed = put(np.packbits(np.stack(list(allowed.values())), axis=1, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed[:, :, None] >> places) & 1
    is_allowed = bits.view(len(allowed), -1)[:, : logits.shape[1]] == 1
    left = logits.index_select(0, rows).masked_fill(~is_allowed, -torch.inf)
    logits.index_copy_(0, rows, left)


def _bias(
    rows: Sequence[int], specs: Sequence[SampleSpec], vocab: int
) -> tuple[LogitIndices, NDArray[Any]]:
    """Each biased_ids position once, with the sum of its biases."""
    each = indices_of(rows, [biased_ids(spec) for spec in specs])
    amounts = [amount for spec in specs for _, amount in spec.sampling.logit_bias]
    keys, inverse = np.unique(each.rows * vocab + each.ids, return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.float32)
    np.add.at(sums, inverse, np.array(amounts, dtype=np.float32))
    return LogitIndices(*np.divmod(keys, vocab)), sums


def _repetition(
    rows: Sequence[int], specs: Sequence[SampleSpec]
) -> tuple[LogitIndices, NDArray[Any]]:
    """Each distinct token of prompt and output, with its row's repetition penalty."""
    penalties = [spec.sampling.repetition_penalty for spec in specs]
    places, _ = seen_by_repetition(rows, specs)
    return places, _of_rows(rows, penalties, places)


def _presence_and_frequency(
    rows: Sequence[int], specs: Sequence[SampleSpec]
) -> tuple[LogitIndices, NDArray[Any]]:
    """Each distinct output token, with its presence and frequency penalty."""
    presence = [spec.sampling.presence_penalty for spec in specs]
    frequency = [spec.sampling.frequency_penalty for spec in specs]
    places, counts = seen_by_presence_and_frequency(rows, specs)
    each = _of_rows(rows, frequency, places) * counts.astype(np.float32)
    return places, each + _of_rows(rows, presence, places)


def _of_rows(rows: Sequence[int], numbers: Sequence[float], places: LogitIndices) -> NDArray[Any]:
    """The value of each position's row, float32."""
    table = np.zeros(max(rows) + 1, dtype=np.float32)
    table[list(rows)] = numbers
    return table[places.rows]
