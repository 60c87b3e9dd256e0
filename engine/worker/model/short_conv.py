"""The short convolution of LFM2 (Liquid AI), its recurrent layer, in plain torch on every device.

Of the three parts B, C and x of the linear `inputs`, a causal convolution of each channel reads the
products B x of a token and of the `kernel - 1` before it, and its result is multiplied by C. The
state is these products, in float32.

All rows of a step are computed at once, with the same operations in the same order for each of
them, so that the bits do not depend on where a prompt is cut or on what else is in the step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.step import NO_STATE
from engine.worker.ports import Linear, StateRuns, StepContext
from engine.worker.ports.layout import Int64s


@dataclass(frozen=True, slots=True)
class ShortConv:
    """The layer up to the linear `out`, which the caller applies. `layer` counts the recurrent
    layers of the stage; `taps` is `[kernel, channels]`, the newest token's last."""

    layer: int
    inputs: Linear
    taps: Tensor
    bias: Tensor | None
    out: Linear

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        """`[tokens, channels]` of this rank."""
        states = context.states
        assert states is not None, "a model with recurrent layers has states"
        y = self.inputs(x)
        b, c, own = y.float().chunk(3, dim=1)
        (state,) = states.layers[self.layer]
        mixed = convolved(b * own, self.taps, self.bias, state, states.runs)
        return mixed.mul_(c).to(y.dtype)


def convolved(
    products: Tensor, taps: Tensor, bias: Tensor | None, state: Tensor, runs: StateRuns
) -> Tensor:
    """`[rows, channels]`; writes the states behind the rows."""
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
    return mixed if bias is None else mixed.add_(bias)


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
