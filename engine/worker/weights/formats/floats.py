"""Float weights: tensors in one dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.ports import Weight, dequantize, name_of


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """The `LinearFormat` of one float dtype; quantized weights are dequantized."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return name_of(self.dtype)

    @property
    def bits(self) -> float:
        return 8 * self.dtype.itemsize

    def convert(self, weight: Weight) -> Tensor:
        return dequantize(weight).to(self.dtype)
