"""Weights in groups whose rows are runs of blocks of bytes, as files of llama.cpp have them.

A `BlockFormat` says where a block has its numbers: for the conversion here, by torch, and for the
kernel of `engine.worker.cpu.kernels.linears.group_packing`.
"""

# mypy: disable-error-code="no-untyped-call"
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups
from engine.worker.weights.formats.mxfp4 import BIAS, halved_scales

HALF_BYTES = 2  # a float16


class Bits(NamedTuple):
    """Some bits of each number of a block.

    From byte `at` on, `run` bytes have the lowest `bits` of as many numbers, then their next `bits`
    those of the next `run` numbers, and so on until the bytes are full; the next bytes follow.
    """

    at: int
    bits: int
    run: int

    def read(self, blocks: Tensor, count: int) -> Tensor:
        """These bits of `count` numbers of uint8 `[out, blocks, bytes]`."""
        found = blocks[:, :, self.at : self.at + count * self.bits // 8]
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=blocks.device)[:, None]
        runs: Tensor = found.unflatten(2, (-1, 1, self.run))
        return ((runs >> shifts) & ((1 << self.bits) - 1)).flatten(2)


class Factors(Enum):
    """How a block has the factors of its groups."""

    BYTES = "int8, then those of minimums or zero points"
    Q2_K = "4 bits, above each the 4 bits of the minimum"
    Q3_K = "6 bits, less 32: the low 4 in 8 bytes, the high 2 in 4"
    Q4_K = "6 bits, also those of minimums, in 12 bytes"
    IQ4_XS = "6 bits, less 32: the high 2 in 2 bytes, the low 4 in 4"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Where blocks of `num_bytes` have their numbers; calling it unpacks rows of them.

    `steps` are the bits of steps from the lowest on. A float16 scale is at byte `scale`, with
    `has_exponents` the exponent of MXFP4; a minimum follows it. The factors of groups are from byte
    `factors` on.
    """

    layout: GroupLayout
    num_bytes: int
    steps: tuple[Bits, ...]
    scale: int = 0
    factors: int = 0
    flipped: int = 0  # bits of steps that are stored inverted
    negates_minimums: bool = False  # they are added
    has_exponents: bool = False
    factors_in: Factors = Factors.BYTES

    @classmethod
    def plain(cls, layout: GroupLayout) -> "BlockFormat":
        """The format in which all numbers have their bytes, see `plain_rows`."""
        factors = HALF_BYTES * (1 + layout.has_minimums)
        arrays = layout.has_factors * (1 + layout.has_minimums) + layout.has_zeros
        at = factors + layout.groups * arrays
        steps = Bits(at, 8, layout.block)
        return cls(layout, at + layout.block, (steps,), factors=factors)

    def weight(self, rows: Tensor, inputs: int) -> GroupedWeight:
        """A weight of rows of blocks, uint8 `[out, bytes]`."""
        return GroupedWeight(self.layout, MappingProxyType({"": rows}), inputs, self)

    def __call__(self, tensors: Mapping[str, Tensor]) -> Groups:
        blocks: Tensor = tensors[""].unflatten(1, (-1, self.num_bytes))
        steps, shift = torch.zeros((), dtype=torch.uint8), 0
        for bits in self.steps:
            steps = steps | (bits.read(blocks, self.layout.block) << shift)
            shift += bits.bits
        layout = self.layout
        minimums = self._halves(blocks, self.scale + HALF_BYTES) if layout.has_minimums else None
        if minimums is not None and self.negates_minimums:
            minimums = -minimums
        arrays = self._arrays(blocks)
        return Groups(
            (steps ^ self.flipped).flatten(1),
            self._scales(blocks),
            factors=next(arrays) if layout.has_factors else None,
            minimums=minimums,
            minimum_factors=next(arrays) if layout.has_factors and layout.has_minimums else None,
            zeros=next(arrays) if layout.has_zeros else None,
        )

    def _halves(self, blocks: Tensor, at: int) -> Tensor:
        return blocks[:, :, at : at + HALF_BYTES].contiguous().view(torch.float16).flatten(1)

    def _scales(self, blocks: Tensor) -> Tensor:
        """Raises `StartupError` if float16 lacks one."""
        if not self.has_exponents:
            return self._halves(blocks, self.scale)
        exponents = blocks[:, :, self.scale]
        scales = halved_scales(exponents)
        if scales is None:
            least, most = (int(each) - BIAS + 1 for each in exponents.aminmax())
            raise StartupError(
                f"MXFP4 weights have scales of 2 ** {least} to 2 ** {most}, which float16 lacks"
            )
        return scales

    def _arrays(self, blocks: Tensor) -> Iterator[Tensor]:
        """The arrays from byte `factors` on, int8 `[out, groups]`."""
        stored = _READERS[self.factors_in](blocks[:, :, self.factors :])
        for array in stored.split(self.layout.groups, dim=2):
            yield array.contiguous().view(torch.int8).flatten(1)


def _fields(stored: Tensor, bits: int) -> Tensor:
    """The fields of so many bits of bytes `[..., n]`, `[..., 8 / bits, n]` from the lowest on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=stored.device)[:, None]
    found: Tensor = (stored[..., None, :] >> shifts) & ((1 << bits) - 1)
    return found


def _q2_k_factors(stored: Tensor) -> Tensor:
    return _fields(stored[..., :16], 4).flatten(-2)


def _q3_k_factors(stored: Tensor) -> Tensor:
    low, high = _fields(stored[..., :8], 4), _fields(stored[..., 8:12], 2)
    return (low.flatten(-2) | high.flatten(-2) << 4) - 32


def _q4_k_factors(stored: Tensor) -> Tensor:
    low, high, rest = stored[..., :4], stored[..., 4:8], stored[..., 8:12]
    scales = (low & 63, (rest & 15) | ((low >> 6) << 4))
    minimums = (high & 63, (rest >> 4) | ((high >> 6) << 4))
    return torch.cat((*scales, *minimums), dim=-1)


def _iq4_xs_factors(stored: Tensor) -> Tensor:
    high, low = _fields(stored[..., :2], 2), _fields(stored[..., 2:6], 4)
    return (low.mT.flatten(-2) | high.mT.flatten(-2) << 4) - 32


_READERS: Mapping[Factors, Callable[[Tensor], Tensor]] = {
    Factors.BYTES: lambda stored: stored,
    Factors.Q2_K: _q2_k_factors,
    Factors.Q3_K: _q3_k_factors,
    Factors.Q4_K: _q4_k_factors,
    Factors.IQ4_XS: _iq4_xs_factors,
}


def plain_rows(groups: Groups, layout: GroupLayout) -> Tensor:
    """Rows of blocks in `BlockFormat.plain`, uint8 `[out, bytes]`."""
    parts = groups.scales, groups.minimums, groups.factors, groups.minimum_factors, groups.zeros
    outputs, blocks = len(groups.steps), groups.steps.shape[1] // layout.block
    found = [
        each.contiguous().view(torch.uint8).view(outputs, blocks, -1)
        for each in (*parts, groups.steps)
        if each is not None
    ]
    return torch.cat(found, dim=2).flatten(1)
