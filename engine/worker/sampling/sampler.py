"""Logits to tokens on the last stage, in vLLM's order of processors.

The grammar's mask comes first. Then logit bias, banned ids, penalties (repetition over prompt and
output, presence and frequency over output); then greedy, or temperature, min-p, top-k, top-p and
one sample. Each row is computed alone, in an order fixed by its ids, and its one uniform random
number is a function of (seed, position), so the other rows of a batch never change a row's token.
An error in one row is that row's fault and does not affect the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import Mask
from engine.step import SampleSpec, TokenLogprobs
from engine.worker.ports import Draw, SamplingOperators
from engine.worker.sampling.filters import RowLogprobs, row_logprobs, to_token_logprobs
from engine.worker.sampling.logits_processors import Put, invalid_id_fields, process

Bits = NDArray[np.uint8]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_GREEDY_BELOW = 1e-5  # temperatures below are greedy, as in vLLM


class RowFault(Exception):
    """No token can be sampled from a row; `is_caller_error` if the request's parameters are why."""

    def __init__(self, line: str, *, is_caller_error: bool = False) -> None:
        super().__init__(line)
        self.is_caller_error = is_caller_error


class Masks(NamedTuple):
    """What grammars allow, by constrained row. `late` rows have no mask yet and sample no token."""

    allowed: Mapping[int, Mask] = MappingProxyType({})
    faults: Mapping[int, RowFault] = MappingProxyType({})
    late: frozenset[int] = frozenset()


NO_MASKS = Masks()
NUM_SOURCES = 3  # ids, the largest logits, and those of processed rows


class SampledBatch(NamedTuple):
    """The outcome of sampling a batch: a token per row, meaningless for rows in `faults`.

    `logprobs` is empty if no row requests them, and None for the rows that do not.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    faults: tuple[tuple[int, RowFault], ...] = ()


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable generators", 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 bits; element `position` of the SplitMix64 stream of `seed`."""
    start = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((start + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def is_plain(spec: SampleSpec) -> bool:
    """Whether no processor changes the row's logits."""
    sampling = spec.sampling
    return not (spec.banned or spec.grammar or sampling.logit_bias or sampling.reads_output)


def is_greedy(spec: SampleSpec) -> bool:
    """Whether the most likely id is taken."""
    return spec.sampling.temperature < _GREEDY_BELOW


def permitted(mask: Mask, spec: SampleSpec, vocab_size: int) -> tuple[Bits, SampleSpec]:
    """The ids that a grammar allows, as bits of bytes from the lowest on, and the spec without bans
    that would leave no token.

    End tokens are allowed when the grammar accepts the output. (An end token that the grammar
    allows as text is allowed, and ends the output all the same.) Raises `RowFault`.
    """
    bits = np.frombuffer(mask.bits, dtype=np.uint8)[: -(-vocab_size // 8)].copy()
    if vocab_size % 8:
        bits[-1] &= (1 << vocab_size % 8) - 1
    if mask.accepts:
        for token in spec.end_ids:
            bits[token >> 3] |= 1 << (token & 7)
    if not bits.any():
        raise RowFault("its grammar allows no token here", is_caller_error=True)
    if spec.banned and mask.accepts:
        left = bits.copy()
        for token in spec.banned:
            left[token >> 3] &= 255 ^ (1 << (token & 7))
        if not left.any():
            return bits, spec._replace(banned=tuple(set(spec.banned) - set(spec.end_ids)))
    return bits, spec


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A batch whose tokens the device is sampling.

    `sources` are the tensors that `finish` needs on the host. `ids` is one of them; it is any id in
    rows whose logits are not finite.
    """

    ids: Tensor  # int64 [rows]
    sources: tuple[Tensor, ...]
    specs: tuple[SampleSpec, ...]
    processed: tuple[int, ...]  # rows with processed logits, which may have no token left
    faults: Mapping[int, RowFault]  # found by the host

    def finish(self, copied: Sequence[Tensor]) -> SampledBatch:
        """The sampled batch; `copied` are `sources` on the host."""
        tokens: list[int] = copied[0].tolist()
        largest: list[float] = copied[1].tolist()
        faults: dict[int, RowFault] = {}
        if not isfinite(sum(largest)):  # in float64, which float32s cannot overflow
            rows = [row for row, value in enumerate(largest) if not isfinite(value)]
            faults = {row: not_finite_fault() for row in rows}
        for row, fault in self.faults.items():
            faults.setdefault(row, fault)
        if self.processed:
            for row, value in zip(self.processed, copied[2].tolist(), strict=True):
                if not isfinite(value):
                    faults.setdefault(row, all_banned_fault())
        if len(copied) == NUM_SOURCES:
            return SampledBatch(tuple(tokens), (), tuple(faults.items()))
        tops = [spec.logprobs for spec in self.specs if spec.logprobs is not None]
        scores = iter(to_token_logprobs(RowLogprobs(*copied[NUM_SOURCES:]), tops))
        logprobs = [None if spec.logprobs is None else next(scores) for spec in self.specs]
        return SampledBatch(tuple(tokens), tuple(logprobs), tuple(faults.items()))


class _Work(NamedTuple):
    """Rows whose logits are processed before sampling, and the ids that grammars allow."""

    specs: dict[int, SampleSpec]
    allowed: dict[int, Bits]
    faults: dict[int, RowFault]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples one token per row by the kernels of `operators`; `put` copies a host array to where
    the logits are.

    `begin` submits all work and reads nothing back, so the next step can use the ids before the
    host knows them. `finish` of its result makes plain Python values of what was copied.
    """

    vocab_size: int
    operators: SamplingOperators
    put: Put = torch.from_numpy

    def sample(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> SampledBatch:
        """Sample as `begin` does, and wait for the result."""
        pending = self.begin(logits, specs, positions, masks)
        return pending.finish([source.cpu() for source in pending.sources])

    def begin(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> PendingSample:
        """Sample one id per row of `[rows, vocab]` float32; may overwrite `logits`.

        `positions[i]` is the position of row i's new token in its request.
        """
        asking = [row for row, spec in enumerate(specs) if spec.logprobs is not None]
        raw_logits = self._rows(logits, asking).clone() if asking else None
        largest = self.operators.argmax(logits)
        ids, left = largest.ids, largest.values[:0]
        work = self._prepare(specs, masks)
        if work.specs:
            ids, left = self._process(logits, ids, work)
        ids = self._sample(logits, ids, specs, positions, idle={*work.faults, *masks.late})
        sources = [ids, largest.values, left]
        if raw_logits is not None:
            most = max(spec.logprobs or 0 for spec in specs)
            sources += row_logprobs(raw_logits, self._rows(ids, asking), most)
        return PendingSample(ids, tuple(sources), tuple(specs), tuple(work.specs), work.faults)

    def _prepare(self, specs: Sequence[SampleSpec], masks: Masks) -> _Work:
        """The part that the host decides, without logits."""
        faults = dict(masks.faults)
        rows = {
            row: spec
            for row, spec in enumerate(specs)
            if not (is_plain(spec) or row in faults or row in masks.late)
        }
        work = _Work({}, {}, faults)
        if not rows:
            return work
        faults.update(invalid_id_faults(rows, self.vocab_size))
        for row, spec in rows.items():
            if row in faults:
                continue
            if (mask := masks.allowed.get(row)) is None:
                work.specs[row] = spec
                continue
            try:
                work.allowed[row], work.specs[row] = permitted(mask, spec, self.vocab_size)
            except RowFault as fault:
                faults[row] = fault
        return work

    def _process(self, logits: Tensor, ids: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
        """Process logits: all rows' argmax afterwards, and the largest logit of processed rows."""
        if work.allowed:
            masked = self.put(np.array(list(work.allowed), dtype=np.int64))
            bits = self.put(np.stack(list(work.allowed.values())))
            self.operators.forbid(logits, masked, bits)
        process(logits, list(work.specs), list(work.specs.values()), self.put)
        rows = self.put(np.array(list(work.specs), dtype=np.int64))
        largest = self.operators.argmax_of(logits, rows)
        return ids.index_copy(0, rows, largest.ids), largest.values

    def _sample(
        self,
        logits: Tensor,
        ids: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        idle: set[int],
    ) -> Tensor:
        """Replace the ids of rows that are not greedy by sampled ones."""
        rows = [row for row, spec in enumerate(specs) if not (is_greedy(spec) or row in idle)]
        if not rows:
            return ids
        asked = [(row, specs[row].sampling) for row in rows]
        draws = [Draw(row, one, uniform(one.seed, positions[row])) for row, one in asked]
        chosen = self.operators.sample(logits, draws)
        if len(rows) == len(specs):
            return chosen
        return ids.index_copy(0, self.put(np.array(rows, dtype=np.int64)), chosen)

    def _rows(self, tensor: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == len(tensor):
            return tensor
        return tensor.index_select(0, self.put(np.array(rows, dtype=np.int64)))


def not_finite_fault() -> RowFault:
    """The fault of a row whose logits are not all finite."""
    return RowFault("the model computed NaN or infinite logits")


def all_banned_fault() -> RowFault:
    """The fault of a row whose tokens are all banned."""
    return RowFault("no token can be sampled: all are banned", is_caller_error=True)


def invalid_id_faults(specs: Mapping[int, SampleSpec], vocab_size: int) -> dict[int, RowFault]:
    """A fault for each row whose spec names an id outside the vocabulary."""
    rows = list(specs)
    return {
        rows[place]: RowFault(
            f"{name} holds an id outside the vocabulary of {vocab_size}", is_caller_error=True
        )
        for place, name in invalid_id_fields(list(specs.values()), vocab_size).items()
    }
