"""The short convolution of LFM2 (Liquid AI), its recurrent layer.

Of the three parts B, C and x of a linear, a causal convolution of each channel reads the products
B x of a token and of the `kernel - 1` before it, and its result is multiplied by C. The state is
these products, in float32.

All rows of a step are computed at once, with the same operations in the same order for each of
them, so that the bits do not depend on where a prompt is cut or on what else is in the step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.step import NO_STATE
from engine.worker.ports import ConvWeights, MambaWeights, StateRuns
from engine.worker.ports.layout import Int64s


@dataclass(frozen=True, slots=True)
class TorchShortConv:
    """The `Recurrence` in plain torch, in float32. It returns the dtype of its inputs."""

    weights: ConvWeights

    def __call__(self, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns) -> Tensor:
        b, c, x = y.float().chunk(3, dim=1)
        (known,) = state
        return convolved(b * x, self.weights, known, runs).mul_(c).to(y.dtype)


def convolved(
    products: Tensor, weights: ConvWeights | MambaWeights, state: Tensor, runs: StateRuns
) -> Tensor:
    """`[rows, channels]`; writes the states behind the rows."""
    taps = weights.conv.t()
    device, before = products.device, len(taps) - 1
    sources = torch.from_numpy(runs.runs[:, 2]).to(device)
    known = state.index_select(0, sources.clamp(min=0))
    known.masked_fill_((sources == NO_STATE).view(-1, 1, 1), 0.0)  # whatever is in slot 0
    pool = torch.cat((known.flatten(0, 1), products))  # states of the runs, then all rows
    index = torch.from_numpy(windows(runs.runs, len(products), before)).to(device)
    mixed = pool.index_select(0, index[:, 0]) * taps[0]
    for tap in range(1, before + 1):
        mixed += pool.index_select(0, index[:, tap]) * taps[tap]
    rows, slots = np.nonzero(runs.writes != NO_STATE)
    written = index[torch.from_numpy(rows).to(device), 1:]
    at = torch.from_numpy(runs.writes[rows, slots]).to(device)
    state.index_copy_(0, at, pool[written])
    return mixed.add_(weights.conv_bias)


def windows(runs: Int64s, num_rows: int, before: int) -> Int64s:
    """`[rows, before + 1]`: where each row and the `before` inputs ahead of it are, the oldest
    first, among the states of all runs (`before` of each) followed by the rows."""
    base = len(runs) * before
    index = np.arange(num_rows)[:, None] + np.arange(-before, 1) + base
    for number, (first, last, _) in enumerate(runs.tolist()):
        for row in range(first, min(first + before, last)):
            missing = before - (row - first)
            start = number * before + before - missing
            index[row, :missing] = np.arange(start, start + missing)
    return index
