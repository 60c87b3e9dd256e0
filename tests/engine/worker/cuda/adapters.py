"""LoRA adapters of one linear, with random weights."""

import torch

from engine.worker.model.torch_operators import TorchLowRank
from engine.worker.ports import LowRankUp
from tests.noise import noise


def an_adapter(
    inputs: int,
    widths: list[int],
    ranks: list[int],
    dtype: torch.dtype,
    seed: int,
    place: str = "cpu",
) -> TorchLowRank:
    """An adapter of a linear with these parts; those of rank 0 are left as they are."""
    first, start, ups = 0, 0, []
    for width, rank in zip(widths, ranks, strict=True):
        if rank:
            weight = noise(width, rank, seed=seed + start, dtype=dtype).to(place)
            ups.append(LowRankUp(slice(first, first + rank), slice(start, start + width), weight))
        first, start = first + rank, start + width
    return TorchLowRank(noise(first, inputs, seed=seed, dtype=dtype).to(place), tuple(ups))
