"""Mamba 2: kernels and torch compute the recurrence, and the same bits however steps are cut."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.step import NO_STATE, StateSlots
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.recurrent_states import state_runs
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import DeltaState, MambaShape, MambaWeights, Operators

SLOTS = 9
SHAPES = [
    MambaShape(1, 2, 16, 8, 4),
    MambaShape(2, 4, 8, 12, 3),
    MambaShape(1, 3, 128, 64, 4),
    MambaShape(2, 6, 16, 72, 2),
]
FIRST, LATER = StateSlots(0, NO_STATE), StateSlots(0, 0)


@pytest.fixture(scope="module", params=["native", "torch"])
def operators(request: pytest.FixtureRequest) -> Operators:
    is_native = request.param == "native"
    return NativeOperators(NativeThreadPool(2)) if is_native else TorchOperators()


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def weights_of(shape: MambaShape) -> MambaWeights:
    heads = shape.num_value_heads
    return MambaWeights(
        shape,
        conv=noise(shape.channels, shape.kernel),
        conv_bias=noise(shape.channels, seed=1),
        decay_rate=-noise(heads, seed=2).exp(),
        decay_bias=noise(heads, seed=3),
        skip=noise(heads, seed=4),
    )


def states_of(shape: MambaShape) -> DeltaState:
    inputs, matrices = (noise(SLOTS, *sizes, seed=5) for sizes in shape.state_sizes)
    return DeltaState(inputs, matrices)


def inputs_of(shape: MambaShape, rows: int) -> Tensor:
    """Rows of a wider tensor, as of a linear with more outputs."""
    width = shape.channels + shape.num_value_heads * (shape.value_dim + 1)
    return noise(rows, width + 16, seed=6)[:, :width]


def run(
    operators: Operators,
    shape: MambaShape,
    y: Tensor,
    *steps: Sequence[tuple[int, StateSlots]],
) -> tuple[Tensor, DeltaState]:
    """Steps of entries with so many rows each, which follow one another in `y`."""
    scan, state = operators.recurrence(weights_of(shape)), states_of(shape)
    outs, at = [], 0
    for entries in steps:
        indptr = [0]
        for rows, _ in entries:
            indptr.append(indptr[-1] + rows)
        runs = state_runs([slots for _, slots in entries], indptr)
        outs.append(scan(y[at : at + indptr[-1]], state, runs).clone())
        at += indptr[-1]
    return torch.cat(outs), state


def by_definition(shape: MambaShape, y: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
    """The outputs of rows behind a state, of which each head has `[key_dim, value_dim]`, in
    float64."""
    weights, keys = weights_of(shape), shape.num_key_heads * shape.key_dim
    heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim
    own, gate, steps = torch.split(y.double(), [shape.channels, width, heads], dim=1)
    rows = torch.cat((inputs.double(), own))
    taps, bias = weights.conv.double()[:, None], weights.conv_bias.double()
    mixed = torch.nn.functional.conv1d(rows.t(), taps, bias, groups=shape.channels).t()
    outs = []
    for row, z, step in zip(mixed, gate, steps, strict=True):
        c, b, x = torch.split(row * row.sigmoid(), [keys, keys, width])
        at = (1 + (step + weights.decay_bias.double()).exp()).log()
        for head in range(heads):
            group = head * shape.num_key_heads // heads * shape.key_dim
            part = slice(group, group + shape.key_dim)
            place = slice(head * shape.value_dim, (head + 1) * shape.value_dim)
            change = torch.outer(b[part], at[head] * x[place])
            state[head] = (weights.decay_rate[head].double() * at[head]).exp() * state[
                head
            ] + change
            read = c[part] @ state[head] + weights.skip[head].double() * x[place]
            outs.append(read * z[place] * z[place].sigmoid())
    return torch.cat(outs).view(len(y), width)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_computes_the_recurrence_as_it_is_defined(
    operators: Operators, shape: MambaShape
) -> None:
    y, before = inputs_of(shape, 30), states_of(shape)
    found, state = run(operators, shape, y, [(1, StateSlots(0, 0)), (29, StateSlots(1, NO_STATE))])
    continued, started = before.matrices[0].double(), torch.zeros_like(before.matrices[1]).double()
    expected = torch.cat(
        (
            by_definition(shape, y[:1], before.inputs[0], continued),
            by_definition(shape, y[1:], torch.zeros_like(before.inputs[1]), started),
        )
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.matrices[0].double(), continued, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.matrices[1].double(), started, rtol=1e-4, atol=1e-4)
    last = y[-(shape.kernel - 1) :, : shape.channels]
    assert torch.equal(state.inputs[1], last)
    assert torch.equal(state.matrices[2:], before.matrices[2:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_how_tokens_are_cut_into_steps(
    operators: Operators, shape: MambaShape
) -> None:
    y = inputs_of(shape, 67)
    whole, state = run(operators, shape, y, [(67, FIRST)])
    for cut in ([1] * 67, [64, 3], [2, 31, 1, 33]):
        steps = [[(count, LATER if at else FIRST)] for at, count in enumerate(cut)]
        found, own = run(operators, shape, y, *steps)
        assert torch.equal(found, whole)
        assert torch.equal(own.matrices[0], state.matrices[0])
        assert torch.equal(own.inputs[0], state.inputs[0])


def test_bits_do_not_depend_on_the_other_requests_of_a_step(operators: Operators) -> None:
    shape = SHAPES[1]
    y, own = inputs_of(shape, 12), StateSlots(3, 1)
    alone, state = run(operators, shape, y[7:], [(5, own)])
    beside = [(1, StateSlots(0, 0)), (6, StateSlots(2, NO_STATE)), (5, own)]
    found, among = run(operators, shape, y, beside)
    assert torch.equal(found[7:], alone)
    assert torch.equal(among.matrices[3], state.matrices[3])


def test_the_rows_of_drafts_leave_the_state_after_each_of_them(operators: Operators) -> None:
    """A verify step of three drafts: slot i has the state of decoding i + 1 tokens."""
    shape = SHAPES[2]
    y = inputs_of(shape, 4)
    rows = [StateSlots(5, 0), StateSlots(6, 5), StateSlots(7, 6), StateSlots(0, 7)]
    found, state = run(operators, shape, y, [(1, slots) for slots in rows])
    for count in range(1, 5):
        expected, own = run(operators, shape, y[:count], *[[(1, LATER)]] * count)
        assert torch.equal(found[:count], expected)
        slot = rows[count - 1].slot
        assert torch.equal(state.matrices[slot], own.matrices[0])
        assert torch.equal(state.inputs[slot], own.inputs[0])
