"""Float weights: tensors in one dtype."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.ports import Weight, dequantize, name_of


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """The `LinearFormat` of one float dtype; quantized weights are dequantized."""

    dtype: torch.dtype
    is_cached: bool = False

    @property
    def name(self) -> str:
        return name_of(self.dtype)

    @property
    def bits(self) -> float:
        return 8 * self.dtype.itemsize

    def convert(self, weight: Weight) -> Tensor:
        return dequantize(weight).to(self.dtype)

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
        found = tensors.get("")
        return found if found is not None and found.shape == shape else None
