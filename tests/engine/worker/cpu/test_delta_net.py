"""Kernels of Gated DeltaNet: the recurrence as defined, with bits that no other row changes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.step import NO_STATE, Snapshot, StateSlots
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.delta_net import TorchDeltaNet
from engine.worker.model.kv.recurrent_states import state_runs
from engine.worker.ports import DeltaShape, DeltaState, DeltaWeights

SLOTS = 9


@pytest.fixture(scope="module")
def operators() -> NativeOperators:
    return NativeOperators(NativeThreadPool(2))


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def weights_of(shape: DeltaShape) -> DeltaWeights:
    heads = shape.num_value_heads
    return DeltaWeights(
        shape,
        conv=noise(shape.channels, shape.kernel),
        decay_rate=-noise(heads, seed=1).exp() / 4,
        decay_bias=noise(heads, seed=2),
        norm=1 + noise(shape.value_dim, seed=3) / 10,
        eps=1e-6,
    )


def states_of(shape: DeltaShape) -> DeltaState:
    return DeltaState(
        noise(SLOTS, shape.kernel - 1, shape.channels, seed=4),
        noise(SLOTS, shape.num_value_heads, shape.key_dim, shape.value_dim, seed=5),
    )


def inputs_of(shape: DeltaShape, rows: int) -> Tensor:
    """Rows of a wider tensor, as of a linear with more outputs."""
    width = shape.channels + shape.num_value_heads * (shape.value_dim + 2)
    return noise(rows, width + 16, seed=6)[:, :width]


SHAPES = [
    DeltaShape(2, 2, 8, 8, 4),
    DeltaShape(2, 4, 8, 12, 3),
    DeltaShape(1, 2, 128, 128, 4),
    DeltaShape(2, 6, 16, 72, 2),
]


def run(
    operators: NativeOperators,
    weights: DeltaWeights,
    y: Tensor,
    steps: Sequence[Sequence[tuple[int, StateSlots]]],
) -> tuple[Tensor, DeltaState]:
    """Steps of entries with so many rows each, which follow one another in `y`."""
    net, state = operators.recurrence(weights), states_of(weights.shape)
    outs, at = [], 0
    for step in steps:
        ends = [0]
        for count, _ in step:
            ends.append(ends[-1] + count)
        runs = state_runs([slots for _, slots in step], ends)
        outs.append(net(y[at : at + ends[-1]], state, runs))
        at += ends[-1]
    return torch.cat(outs), state


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_computes_the_recurrence_as_it_is_defined(
    operators: NativeOperators, shape: DeltaShape
) -> None:
    entries = [
        (1, StateSlots(0, 0)),
        (1, StateSlots(1, NO_STATE, (Snapshot(1, 5),))),
        (1, StateSlots(6, 2)),  # with the next entry: the rows of a decode with a draft
        (1, StateSlots(2, 6)),
        (70, StateSlots(3, 4, (Snapshot(2, 7), Snapshot(70, 8)))),
    ]
    y, weights = inputs_of(shape, 74), weights_of(shape)
    found, state = run(operators, weights, y, [entries])
    doubles = replace(
        weights,
        **{name: getattr(weights, name).double() for name in ("conv", "decay_rate", "decay_bias")},
        norm=weights.norm.double(),
    )
    expected_state = DeltaState(*(part.double() for part in states_of(shape)))
    runs = state_runs([slots for _, slots in entries], [0, 1, 2, 3, 4, 74])
    expected = TorchDeltaNet(doubles)(y.double(), expected_state, runs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    for part, wanted in zip(state, expected_state, strict=True):
        torch.testing.assert_close(part.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_how_tokens_are_cut_into_steps(
    operators: NativeOperators, shape: DeltaShape
) -> None:
    y, weights = inputs_of(shape, 67), weights_of(shape)
    first, later = StateSlots(0, NO_STATE), StateSlots(0, 0)
    whole, state = run(operators, weights, y, [[(67, first)]])
    cuts = ([1] * 67, [64, 3], [2, 31, 1, 33])
    for cut in cuts:
        steps = [[(count, later if at else first)] for at, count in enumerate(cut)]
        found, own = run(operators, weights, y, steps)
        assert torch.equal(found, whole)
        assert torch.equal(own.matrices[0], state.matrices[0])
        assert torch.equal(own.inputs[0], state.inputs[0])


def test_bits_do_not_depend_on_the_other_requests_of_a_step(operators: NativeOperators) -> None:
    shape = SHAPES[1]
    y, weights = inputs_of(shape, 12), weights_of(shape)
    alone, state = run(operators, weights, y[7:], [[(5, StateSlots(3, 1))]])
    beside = [(1, StateSlots(0, 0)), (6, StateSlots(2, NO_STATE)), (5, StateSlots(3, 1))]
    found, own = run(operators, weights, y, [beside])
    assert torch.equal(found[7:], alone)
    assert torch.equal(own.matrices[3], state.matrices[3])


def test_the_rows_of_drafts_leave_the_state_after_each_of_them(operators: NativeOperators) -> None:
    """A verify step of three drafts: slot i has the state of decoding i + 1 tokens."""
    shape = SHAPES[2]
    y, weights = inputs_of(shape, 4), weights_of(shape)
    rows = [StateSlots(5, 0), StateSlots(6, 5), StateSlots(7, 6), StateSlots(0, 7)]
    found, state = run(operators, weights, y, [[(1, slots) for slots in rows]])
    for count in range(1, 5):
        steps = [[(1, StateSlots(0, 0))]] * count
        expected, own = run(operators, weights, y[:count], steps)
        assert torch.equal(found[:count], expected)
        slot = rows[count - 1].slot
        assert torch.equal(state.matrices[slot], own.matrices[0])
        assert torch.equal(state.inputs[slot], own.inputs[0])
