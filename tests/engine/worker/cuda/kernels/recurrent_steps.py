"""Steps of recurrent layers by the kernels of a GPU, and by plain torch."""

from dataclasses import fields, replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.step import NO_STATE, Snapshot, StateSlots
from engine.worker.model.kv.recurrent_states import filled, flat, state_runs
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import (
    ConvShape,
    ConvWeights,
    DeltaShape,
    DeltaWeights,
    MambaShape,
    MambaWeights,
    RecurrentShape,
    RecurrentWeights,
)
from tests.engine.worker.cpu.recurrences import Step, states_of
from tests.noise import noise

DECODES: Step = [
    (1, StateSlots(0, 0)),
    (1, StateSlots(1, NO_STATE, (Snapshot(1, 5),))),
    (1, StateSlots(7, 3)),
]
MIXED: Step = [
    *DECODES[:2],
    (1, StateSlots(6, 2)),  # with the next entry: the rows of a decode with a draft
    (1, StateSlots(2, 6)),
    (40, StateSlots(4, 4, (Snapshot(2, 7), Snapshot(40, 8)))),
    (2, StateSlots(3, 3, (Snapshot(1, 9),))),
]


def weights_of(shape: RecurrentShape) -> RecurrentWeights:
    if isinstance(shape, ConvShape):
        sizes = shape.channels, shape.kernel
        return ConvWeights(shape, noise(*sizes), noise(shape.channels, seed=1))
    assert isinstance(shape, DeltaShape)
    heads, conv = shape.num_value_heads, noise(shape.channels, shape.kernel)
    rate, bias = -noise(heads, seed=1).exp() / 4, 3 * noise(heads, seed=2)
    if isinstance(shape, MambaShape):
        added = noise(shape.channels, seed=4), noise(heads, seed=5)
        return MambaWeights(shape, conv, added[0], rate, bias, added[1])
    return DeltaWeights(shape, conv, rate, bias, 1 + noise(shape.value_dim, seed=3) / 10, 1e-6)


def run(
    kernels: ModuleType, weights: RecurrentWeights, y: Tensor, *steps: Step, num_more: int = 0
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Steps of entries, whose rows follow one another in `y`, as the kernels compute them; the last
    one with so many rows of padding."""
    state = tuple(each.to(y.device) for each in states_of(weights.shape))
    outs, at = [], 0
    for entries in steps:
        ends = [0, *accumulate(rows for rows, _ in entries)]
        count = ends[-1] + (num_more if entries is steps[-1] else 0)
        runs = filled(state_runs([slots for _, slots in entries], ends), count)
        numbers = [torch.from_numpy(each).to(y.device) for each in flat(runs)]
        runs = runs._replace(on_device=(numbers[0], numbers[1]))
        outs.append(kernels.recurrence(weights, y[at : at + count], state, runs)[: ends[-1]])
        at += ends[-1]
    return torch.cat(outs), state


def wanted(weights: RecurrentWeights, y: Tensor, entries: Step) -> tuple[Tensor, ...]:
    """The results and states of plain torch."""
    state = tuple(each.to(y.device) for each in states_of(weights.shape))
    ends = [0, *accumulate(rows for rows, _ in entries)]
    runs = state_runs([slots for _, slots in entries], ends)
    return TorchOperators().recurrence(weights)(y, state, runs), *state


def num_rows(entries: Step) -> int:
    return sum(rows for rows, _ in entries)


def on(place: torch.device, weights: RecurrentWeights) -> RecurrentWeights:
    """The weights on this device."""
    moved: dict[str, Any] = {
        each.name: value.to(place)
        for each in fields(weights)
        if isinstance(value := getattr(weights, each.name), Tensor)
    }
    return replace(weights, **moved)
