"""Keys and values as 8-bit floats (e4m3): one number for all says what one of them counts."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = 448.0  # there is no infinity: whatever is beyond becomes this


def rounded(rows: Tensor, scale: float) -> Tensor:
    """The 8-bit floats nearest to `rows / scale`."""
    scaled = rows if scale == 1.0 else rows * (1 / scale)
    return scaled.clamp(-MOST, MOST).to(FP8)
