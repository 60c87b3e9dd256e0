"""FP8 weights (e4m3), with a scale for each run of inputs of an output channel."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import torch
from torch import Tensor

FP8 = "fp8"
SCALES = "_scales"  # name in `Fp8Weight.tensors`


class Fp8Weight(NamedTuple):
    """A `QuantizedWeight`: the matrix whose input `i` is `values[:, i] * scales[:, i // run]`."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, runs]
    run: int

    @property
    def format(self) -> str:
        return FP8

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return MappingProxyType({"": self.values, SCALES: self.scales})

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return self._replace(values=function(self.values), scales=function(self.scales))

    def rows(self, rows: slice) -> Self:
        return self._replace(values=self.values[rows], scales=self.scales[rows])

    def dequantize(self) -> Tensor:
        scales = self.scales.repeat_interleave(self.run, dim=1)[:, : self.values.shape[1]]
        return self.values.float() * scales
