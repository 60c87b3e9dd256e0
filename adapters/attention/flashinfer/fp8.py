"""Keys and values as 8-bit floats (e4m3) with one scale per tensor."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MAX = 448.0  # the largest e4m3 value; there is no infinity, larger values are clamped


def quantize(rows: Tensor, scale: float) -> Tensor:
    """`rows / scale` rounded to the nearest e4m3 value."""
    scaled = rows if scale == 1.0 else rows * (1 / scale)
    return scaled.clamp(-MAX, MAX).to(FP8)
