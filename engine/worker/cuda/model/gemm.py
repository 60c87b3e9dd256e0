"""8-bit GEMMs by torch; sizes must be multiples of what the tensor cores take."""

import torch
from torch import Tensor
from torch.nn import functional as F

FP8_BY_ROW = (9, 0)  # the first with one scale per row
INT8_ROWS = 17  # torch._int_mm takes no fewer rows
INT8_ALIGNMENT = 8  # both dimensions of a weight must be multiples of it
FP8_ALIGNMENT = 16


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in int32 of int8; weights are `[out, in]`, row-major."""
    count = len(x)
    if count < INT8_ROWS:
        x = F.pad(x, (0, 0, 0, INT8_ROWS - count))
    return torch._int_mm(x, weight.t())[:count]


def fp8_product(
    x: Tensor, weight: Tensor, scales: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """`(x * scales) @ (weight * weight_scales).T`; scales are `[rows, 1]` and `[out, 1]`."""
    return torch._scaled_mm(
        x, weight.t(), scale_a=scales, scale_b=weight_scales.t(), out_dtype=dtype
    )
