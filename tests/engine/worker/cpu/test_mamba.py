import pytest
import torch
from torch import Tensor

from engine.step import NO_STATE, StateSlots
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import MambaShape, MambaWeights, Operators
from tests.engine.worker.cpu.recurrences import inputs_of, run, states_of
from tests.noise import noise

SHAPES = [
    MambaShape(1, 2, 16, 8, 4),
    MambaShape(2, 4, 8, 12, 3),
    MambaShape(1, 3, 128, 64, 4),
    MambaShape(2, 6, 16, 72, 2),
]


@pytest.fixture(scope="module", params=["native", "torch"])
def operators(request: pytest.FixtureRequest) -> Operators:
    is_native = request.param == "native"
    return NativeOperators(NativeThreadPool(2)) if is_native else TorchOperators()


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
    weights, (inputs, matrices) = weights_of(shape), states_of(shape)
    y, entries = inputs_of(weights, 30), [(1, StateSlots(0, 0)), (29, StateSlots(1, NO_STATE))]
    found, (new_inputs, new) = run(operators, weights, y, entries)
    continued, started = matrices[0].double(), torch.zeros_like(matrices[1]).double()
    expected = torch.cat(
        (
            by_definition(shape, y[:1], inputs[0], continued),
            by_definition(shape, y[1:], torch.zeros_like(inputs[1]), started),
        )
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new[0].double(), continued, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new[1].double(), started, rtol=1e-4, atol=1e-4)
    last = y[-(shape.kernel - 1) :, : shape.channels]
    assert torch.equal(new_inputs[1], last)
    assert torch.equal(new[2:], matrices[2:])
