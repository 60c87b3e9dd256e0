"""Logits to tokens on the last stage, in vLLM's order of processors.

What a grammar allows comes first. Then logit bias, banned ids, penalties (repetition over prompt
and output, presence and frequency over output); then greedy, or temperature, min-p, top-k, top-p
and one draw. Each row is worked on by itself in an order fixed by its ids, and its one uniform
number is a function of (seed, position), so batch mates never change a row's token. What is wrong
with one row is its fault and nobody else's.
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
from engine.worker.sampling.logits_processors import process, strangers
from engine.worker.sampling.logprobs import log_probabilities

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# The most that the logits of eight ids may be, for each byte of a mask: infinite, or minus that.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MOST = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)
_COLDEST = 1e-5  # temperatures below are greedy, as in vLLM


class RowFault(Exception):
    """Nothing can be drawn from a row; `is_caller_error` if the request's own demands are why."""

    def __init__(self, line: str, *, is_caller_error: bool = False) -> None:
        super().__init__(line)
        self.is_caller_error = is_caller_error


class Masks(NamedTuple):
    """What grammars allow in constrained rows; `late` rows have no mask, and draw nothing."""

    allowed: Mapping[int, Mask] = MappingProxyType({})
    faults: Mapping[int, RowFault] = MappingProxyType({})
    late: frozenset[int] = frozenset()


NO_MASKS = Masks()


class SampledToken(NamedTuple):
    """What came of each row: a token, which means nothing where the row is among `faults`.

    `logprobs` are empty if nobody asks, and None for who does not.
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


def is_plain(draw: SampleSpec) -> bool:
    """Whether nothing is done to its logits."""
    sampling = draw.sampling
    return not (draw.banned or draw.grammar or sampling.logit_bias or sampling.reads_output)


def is_greedy(draw: SampleSpec) -> bool:
    """Whether the likeliest id is taken."""
    return draw.sampling.temperature < _COLDEST


def constrain(logits: Floats, mask: Mask, draw: SampleSpec) -> SampleSpec:
    """Leave what the grammar allows of one row, in place; the draw, less bans that would end it.

    End tokens are allowed when the grammar accepts the output. (One that is text to the grammar
    is allowed as text, and ends the answer all the same.) Raises `RowFault`.
    """
    bits = np.frombuffer(mask.bits, dtype=np.uint8)
    most = _MOST.take(bits, axis=0).reshape(-1)[: len(logits)]
    if mask.accepts:
        most[list(draw.end_ids)] = np.inf
    np.minimum(logits, most, out=logits)
    if most.max() < 0:
        raise RowFault("its grammar allows no token here", is_caller_error=True)
    if draw.banned and mask.accepts:
        most[list(draw.banned)] = -np.inf
        if most.max() < 0:
            return draw._replace(banned=tuple(set(draw.banned) - set(draw.end_ids)))
    return draw


class Draws(Protocol):
    """What draws one token per row."""

    @property
    def vocab_size(self) -> int: ...

    def draw(
        self,
        logits: Tensor,
        draws: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> SampledToken:
        """One id per row of `[rows, vocab]` float32; may overwrite `logits`.

        `positions[i]` is where row i's new token will stand.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """See `Draws`; the larger part in numpy."""

    vocab_size: int
    operators: Operators

    def draw(
        self,
        logits: Tensor,
        draws: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> SampledToken:
        """See `Draws`."""
        asking = [row for row, draw in enumerate(draws) if draw.logprobs is not None]
        untouched = logits[asking] if asking else None
        largest = self.operators.argmax(logits)
        tokens: list[int] = largest.ids.tolist()
        faults = {**_blemishes(largest.values), **masks.faults}
        worked_on = [row for row, draw in enumerate(draws) if not is_plain(draw)]
        if worked_on:
            rows = [row for row in worked_on if not (row in faults or row in masks.late)]
            self._work_on(logits, {row: draws[row] for row in rows}, masks, tokens, faults)
        idle = masks.late.union(faults)
        drawn = [row for row, draw in enumerate(draws) if not (is_greedy(draw) or row in idle)]
        if drawn:
            samplings = [draws[row].sampling for row in drawn]
            points = [uniform(draws[row].sampling.seed, positions[row]) for row in drawn]
            found = self.operators.sample(logits, drawn, samplings, points)
            for row, token in zip(drawn, found, strict=True):
                tokens[row] = token
        logprobs = () if untouched is None else _tell(untouched, draws, tokens)
        return SampledToken(tuple(tokens), logprobs, tuple(faults.items()))

    def _work_on(
        self,
        logits: Tensor,
        draws: dict[int, SampleSpec],
        masks: Masks,
        tokens: list[int],
        faults: dict[int, RowFault],
    ) -> None:
        """Process these rows in place; their largest ids, and what is wrong with some of them."""
        values: Floats = logits.numpy(force=True)
        faults.update(foreign(draws, self.vocab_size))
        left: dict[int, SampleSpec] = {}
        for row, draw in draws.items():
            mask = masks.allowed.get(row)
            try:
                if row not in faults:
                    left[row] = draw if mask is None else constrain(values[row], mask, draw)
            except RowFault as fault:
                faults[row] = fault
        process(values, list(left), list(left.values()))
        for row in left:
            tokens[row] = token = int(values[row].argmax())
            if not np.isfinite(values[row, token]):
                faults[row] = nothing_left()


def blemish() -> RowFault:
    """The fault of a row whose logits are not all finite."""
    return RowFault("the model computed NaN or infinite logits")


def nothing_left() -> RowFault:
    """The fault of a row of which everything is forbidden."""
    return RowFault("no token is left to draw: every one is banned", is_caller_error=True)


def foreign(draws: Mapping[int, SampleSpec], vocab_size: int) -> dict[int, RowFault]:
    """A fault for each row whose draw names an id that there is not."""
    rows = list(draws)
    return {
        rows[place]: RowFault(
            f"{name} holds an id outside the vocabulary of {vocab_size}", is_caller_error=True
        )
        for place, name in strangers(list(draws.values()), vocab_size).items()
    }


def _blemishes(largest: Tensor) -> dict[int, RowFault]:
    """A fault for each row with NaN or infinite logits, of which the largest tells."""
    values: list[float] = largest.tolist()
    if isfinite(sum(values)):  # in float64, which float32s cannot overflow
        return {}
    return {row: blemish() for row, value in enumerate(values) if not isfinite(value)}


def _tell(
    untouched: Tensor, draws: Sequence[SampleSpec], tokens: Sequence[int]
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities for the draws that ask, whose logits are the rows of `untouched`."""
    asking = [
        (draw.logprobs, token)
        for draw, token in zip(draws, tokens, strict=True)
        if draw.logprobs is not None
    ]
    told = iter(
        log_probabilities(untouched, [token for _, token in asking], [top for top, _ in asking])
    )
    return tuple(None if draw.logprobs is None else next(told) for draw in draws)
