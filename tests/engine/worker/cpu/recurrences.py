"""Recurrent layers with random weights and states, and steps of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.step import StateSlots
from engine.worker.model.kv.recurrent_states import state_runs
from engine.worker.ports import (
    ConvWeights,
    MambaWeights,
    Operators,
    RecurrentShape,
    RecurrentWeights,
)
from tests.noise import noise

SLOTS = 10

Step = Sequence[tuple[int, StateSlots]]  # rows and slots of each entry


def states_of(shape: RecurrentShape) -> tuple[Tensor, ...]:
    return tuple(noise(SLOTS, *sizes, seed=5) for sizes in shape.state_sizes)


def inputs_of(weights: RecurrentWeights, rows: int) -> Tensor:
    """Rows of a wider tensor, as of a linear with more outputs."""
    if isinstance(weights, ConvWeights):
        width = 3 * weights.shape.channels
    else:
        numbers, shape = 1 if isinstance(weights, MambaWeights) else 2, weights.shape
        width = shape.channels + shape.num_value_heads * (shape.value_dim + numbers)
    return noise(rows, width + 16, seed=6)[:, :width]


def run(
    operators: Operators,
    weights: RecurrentWeights,
    y: Tensor,
    *steps: Step,
    state: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Steps of entries with so many rows each, which follow one another in `y`."""
    scan, state = operators.recurrence(weights), state or states_of(weights.shape)
    outs, at = [], 0
    for entries in steps:
        ends = [0]
        for rows, _ in entries:
            ends.append(ends[-1] + rows)
        runs = state_runs([slots for _, slots in entries], ends)
        outs.append(scan(y[at : at + ends[-1]].clone(), state, runs).clone())
        at += ends[-1]
    return torch.cat(outs), state
