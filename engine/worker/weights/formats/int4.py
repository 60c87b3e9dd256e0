"""int4 weights: 16 steps, with one float16 scale for each 32 inputs of an output channel.

The numbers are those of llama.cpp's Q4_0: `scale * (nibble - 8)`, nibbles from 0 to 15.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.worker.ports import Weight, dequantize

GROUP = 32  # inputs with one scale
MIDDLE = 8  # the nibble that stands for 0
ELEMENTS_AT_ONCE = 1 << 16  # that are quantized together, in cache
SCALES = "_scales"  # suffix of the scales in a quantized cache
# Of these fractions of a group's largest weight, the one with the least squared error is its range.
FRACTIONS = (1.1, 1.05, 1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.8)


class Int4Weight(NamedTuple):
    """A `QuantizedWeight` `[out, in]`; both tensors are padded to whole groups of inputs."""

    nibbles: Tensor  # uint8 [out, in / 2]: inputs 2i in the low bits, 2i + 1 in the high bits
    scales: Tensor  # float16 [out, in / 32]
    inputs: int

    @property
    def format(self) -> str:
        return INT4.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.nibbles), self.inputs))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return MappingProxyType({"": self.nibbles, SCALES: self.scales})

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(function(self.nibbles), function(self.scales), self.inputs)

    def rows(self, rows: slice) -> Self:
        return type(self)(self.nibbles[rows], self.scales[rows], self.inputs)

    @property
    def steps(self) -> Tensor:
        """The nibbles as int8 `[out, padded in]`, 0 to 15."""
        pairs = torch.stack((self.nibbles & 15, self.nibbles >> 4), dim=2)
        return pairs.flatten(1).to(torch.int8)

    def dequantize(self) -> Tensor:
        values = (self.steps - MIDDLE).view(*self.scales.shape, GROUP).to(torch.float32)
        values *= self.scales.to(torch.float32)[:, :, None]
        return values.flatten(1)[:, : self.inputs]


def quantize(weight: Weight) -> Int4Weight:
    """The weight in int4, each element rounded to the nearest step of its group."""
    if isinstance(weight, Int4Weight):
        return weight
    floats = dequantize(weight)
    outputs, inputs = floats.shape
    groups = -(-inputs // GROUP)
    nibbles = torch.empty((outputs, groups * GROUP // 2), dtype=torch.uint8)
    scales = torch.empty((outputs, groups), dtype=torch.float16)
    rows_at_once = max(1, ELEMENTS_AT_ONCE // inputs)
    for at in range(0, outputs, rows_at_once):
        here = slice(at, at + rows_at_once)
        rows = floats[here].to(torch.float32)
        rows = torch.nn.functional.pad(rows, (0, groups * GROUP - inputs))
        steps, scales[here] = _quantize_groups(rows.view(-1, groups, GROUP))
        steps = steps.flatten(1)
        nibbles[here] = steps[:, ::2] | (steps[:, 1::2] << 4)
    return Int4Weight(nibbles, scales, inputs)


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Steps in uint8, and scales, of `[rows, groups, GROUP]` floats.

    The largest magnitude becomes -8 steps, so the scale has the opposite sign of its weight.
    """
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    best_error = torch.full_like(largest, torch.inf)
    best_steps = torch.zeros_like(groups)
    best_scales = torch.zeros_like(largest, dtype=torch.float16)
    for fraction in FRACTIONS:
        scales = (largest * (-fraction / MIDDLE)).to(torch.float16)
        own = scales.to(torch.float32)[:, :, None]
        inverse = torch.where(own != 0, 1 / own, 0.0)
        steps = (groups * inverse).round_().clamp_(-MIDDLE, MIDDLE - 1)
        error = (steps * own).sub_(groups).square_().sum(dim=2)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scales = torch.where(is_better, scales, best_scales)
        best_steps = torch.where(is_better[:, :, None], steps, best_steps)
    return best_steps.add_(MIDDLE).to(torch.uint8), best_scales


class Int4Format:
    """The `LinearFormat` of int4."""

    name = "int4"
    bits = 4 + 16 / GROUP
    is_cached = True

    def convert(self, weight: Weight) -> Int4Weight:
        return quantize(weight)

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Int4Weight | None:
        nibbles, scales = tensors.get(""), tensors.get(SCALES)
        if nibbles is None or scales is None:
            return None
        outputs, groups = shape[0], -(-shape[1] // GROUP)
        is_int4 = nibbles.dtype == torch.uint8 and scales.dtype == torch.float16
        is_right = nibbles.shape == (outputs, groups * GROUP // 2)
        if not is_int4 or not is_right or scales.shape != (outputs, groups):
            return None
        return Int4Weight(nibbles, scales, shape[1])


INT4 = Int4Format()
