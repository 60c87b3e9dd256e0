"""Normal numbers, the same ones for a seed."""

import torch
from torch import Tensor


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bfloat16_noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return noise(*shape, seed=seed, dtype=dtype)
