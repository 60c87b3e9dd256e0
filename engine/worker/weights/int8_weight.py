"""Weights of 8 bits: whole steps either way of zero, and one scale for each output channel.

What a linear is made of is a float32 tensor or one of these; expanding it is exact in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 127  # steps either way
ROWS_AT_ONCE = 4096  # output channels that are rounded together


class Int8Weight(NamedTuple):
    """A matrix `[out, in]` that is `values * scales[:, None]`."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def cut(self, rows: slice, columns: slice) -> "Int8Weight":
        """Some rows and columns; each keeps the scale of its whole row."""
        return Int8Weight(self.values[rows, columns], self.scales[rows])

    def dequantize(self) -> Tensor:
        """The same matrix in float32."""
        return self.values.to(torch.float32).mul_(self.scales[:, None])


Weight = Tensor | Int8Weight  # of a linear, [out, in]


def dequantize(weight: Weight) -> Tensor:
    """The weight as a tensor of floats."""
    return weight.dequantize() if isinstance(weight, Int8Weight) else weight


def quantize(weight: Weight) -> Int8Weight:
    """The weight in 8 bits, each row to the nearest of its steps; what is rounded stays."""
    if isinstance(weight, Int8Weight):
        return weight
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for at in range(0, len(weight), ROWS_AT_ONCE):
        here = slice(at, at + ROWS_AT_ONCE)
        scales[here] = weight[here].abs().amax(dim=1) / MOST
        steps = scales[here].where(scales[here] > 0, 1.0)
        values[here] = (weight[here] / steps[:, None]).round_()
    return Int8Weight(values, scales)
