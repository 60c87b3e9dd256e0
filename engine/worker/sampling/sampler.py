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
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.grammar import Mask
from engine.step import SampleSpec, TokenLogprobs
from engine.worker.ports import Operators
from engine.worker.sampling.filters import Floats
from engine.worker.sampling.logits_processors import invalid_id_fields, process
from engine.worker.sampling.logprobs import log_probabilities

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Upper bounds of the logits of eight ids for each byte of a mask: infinity, or minus infinity.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)
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


def constrain(logits: Floats, mask: Mask, spec: SampleSpec) -> SampleSpec:
    """Mask one row's logits in place; returns the spec, without bans that would leave no token.

    End tokens are allowed when the grammar accepts the output. (An end token that the grammar
    allows as text is allowed, and ends the output all the same.) Raises `RowFault`.
    """
    bits = np.frombuffer(mask.bits, dtype=np.uint8)
    most = _BOUNDS.take(bits, axis=0).reshape(-1)[: len(logits)]
    if mask.accepts:
        most[list(spec.end_ids)] = np.inf
    np.minimum(logits, most, out=logits)
    if most.max() < 0:
        raise RowFault("its grammar allows no token here", is_caller_error=True)
    if spec.banned and mask.accepts:
        most[list(spec.banned)] = -np.inf
        if most.max() < 0:
            return spec._replace(banned=tuple(set(spec.banned) - set(spec.end_ids)))
    return spec


class Sampler(Protocol):
    """Samples one token per row."""

    @property
    def vocab_size(self) -> int: ...

    def sample(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> SampledBatch:
        """One id per row of `[rows, vocab]` float32; may overwrite `logits`.

        `positions[i]` is the position of row i's new token in its request.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostSampler:
    """A `Sampler` mostly in numpy, on any device."""

    vocab_size: int
    operators: Operators

    def sample(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> SampledBatch:
        with_logprobs = [row for row, spec in enumerate(specs) if spec.logprobs is not None]
        raw_logits = logits[with_logprobs] if with_logprobs else None
        largest = self.operators.argmax(logits)
        tokens: list[int] = largest.ids.tolist()
        faults = {**_not_finite_faults(largest.values), **masks.faults}
        processed = [row for row, spec in enumerate(specs) if not is_plain(spec)]
        if processed:
            rows = [row for row in processed if not (row in faults or row in masks.late)]
            self._process(logits, {row: specs[row] for row in rows}, masks, tokens, faults)
        idle = masks.late.union(faults)
        sampled = [row for row, spec in enumerate(specs) if not (is_greedy(spec) or row in idle)]
        if sampled:
            samplings = [specs[row].sampling for row in sampled]
            points = [uniform(specs[row].sampling.seed, positions[row]) for row in sampled]
            found = self.operators.sample(logits, sampled, samplings, points)
            for row, token in zip(sampled, found, strict=True):
                tokens[row] = token
        logprobs = () if raw_logits is None else _tell(raw_logits, specs, tokens)
        return SampledBatch(tuple(tokens), logprobs, tuple(faults.items()))

    def _process(
        self,
        logits: Tensor,
        specs: dict[int, SampleSpec],
        masks: Masks,
        tokens: list[int],
        faults: dict[int, RowFault],
    ) -> None:
        """Apply the processors to these rows in place; updates their greedy tokens and faults."""
        values: Floats = logits.numpy(force=True)
        faults.update(invalid_id_faults(specs, self.vocab_size))
        valid: dict[int, SampleSpec] = {}
        for row, spec in specs.items():
            mask = masks.allowed.get(row)
            try:
                if row not in faults:
                    valid[row] = spec if mask is None else constrain(values[row], mask, spec)
            except RowFault as fault:
                faults[row] = fault
        process(values, list(valid), list(valid.values()))
        for row in valid:
            tokens[row] = token = int(values[row].argmax())
            if not np.isfinite(values[row, token]):
                faults[row] = all_banned_fault()


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


def _not_finite_faults(largest: Tensor) -> dict[int, RowFault]:
    """A fault for each row with NaN or infinite logits: then its largest is not finite."""
    values: list[float] = largest.tolist()
    if isfinite(sum(values)):  # in float64, which float32s cannot overflow
        return {}
    return {row: not_finite_fault() for row, value in enumerate(values) if not isfinite(value)}


def _tell(
    raw_logits: Tensor, specs: Sequence[SampleSpec], tokens: Sequence[int]
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities for the specs that request them; `raw_logits` has those rows only."""
    requested = [
        (spec.logprobs, token)
        for spec, token in zip(specs, tokens, strict=True)
        if spec.logprobs is not None
    ]
    found = iter(
        log_probabilities(
            raw_logits, [token for _, token in requested], [top for top, _ in requested]
        )
    )
    return tuple(None if spec.logprobs is None else next(found) for spec in specs)
