"""int8 weights: symmetric, with one float32 scale per output channel."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.worker.ports import Weight

MAX_INT8 = 127  # quantized values lie in [-127, 127]
ROWS_AT_ONCE = 4096  # output channels that are quantized together
SCALES = "_scales"  # name in `Int8Weight.tensors`


class Int8Weight(NamedTuple):
    """A `QuantizedWeight`: the matrix `[out, in]` that is `values * scales[:, None]`."""

    values: Tensor  # int8 [out, in]
    scales: Tensor  # float32 [out]

    @property
    def format(self) -> str:
        return INT8.name

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return MappingProxyType({"": self.values, SCALES: self.scales})

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(function(self.values), function(self.scales))

    def rows(self, rows: slice) -> Self:
        return type(self)(self.values[rows], self.scales[rows])

    def dequantize(self) -> Tensor:
        return self.values.to(torch.float32).mul_(self.scales[:, None])


def quantize(weight: Weight) -> Int8Weight:
    """The weight in int8, each element rounded to the nearest multiple of its row's scale."""
    if isinstance(weight, Int8Weight):
        return weight
    if not isinstance(weight, Tensor):
        weight = weight.dequantize()
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for at in range(0, len(weight), ROWS_AT_ONCE):
        here = slice(at, at + ROWS_AT_ONCE)
        rows = weight[here].to(torch.float32)
        scales[here] = rows.abs().amax(dim=1) / MAX_INT8
        steps = scales[here].where(scales[here] > 0, 1.0)
        values[here] = (rows / steps[:, None]).round_()
    return Int8Weight(values, scales)


class Int8Format:
    """The `LinearFormat` of int8. The scales of a row are not counted in `bits`."""

    name = "int8"
    bits = 8.0

    def convert(self, weight: Weight) -> Int8Weight:
        return quantize(weight)


INT8 = Int8Format()
