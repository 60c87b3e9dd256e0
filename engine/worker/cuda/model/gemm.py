"""Matrix products of 8 bits: torch's, which want sizes that suit the tensor cores."""

from typing import Protocol

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
FP8_CAPABILITY = (8, 9)  # Ada and Hopper: the first with tensor cores of 8-bit floats
FP8_BY_ROW = (9, 0)  # the first whose products take a scale for each row
INT8_ROWS = 17  # the fewest rows that torch takes
INT8_ALIGNMENT = 8  # of both dimensions of a weight
FP8_ALIGNMENT = 16


class Products(Protocol):
    """What computes with 8 bits; weights `[out, in]` lie row by row."""

    def int8(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight.T` in int32, of at least `INT8_ROWS` rows."""
        ...

    def fp8(
        self, x: Tensor, weight: Tensor, scales: Tensor, weight_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """`(x * scales) @ (weight * weight_scales).T`; scales are `[rows, 1]` and `[out, 1]`."""
        ...


class TorchProducts:
    """See `Products`."""

    def int8(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch._int_mm(x, weight.t())

    def fp8(
        self, x: Tensor, weight: Tensor, scales: Tensor, weight_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch._scaled_mm(
            x, weight.t(), scale_a=scales, scale_b=weight_scales.t(), out_dtype=dtype
        )
