"""The short convolution of LFM2: a kernel and torch compute it as it is defined."""

import pytest
import torch
from torch.nn import functional as F

from engine.step import NO_STATE, StateSlots
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import ConvShape, ConvWeights, Operators
from tests.engine.worker.cpu.recurrences import inputs_of, run, states_of
from tests.noise import noise

SHAPES = [ConvShape(10, 2), ConvShape(600, 3), ConvShape(16, 4), ConvShape(8, 1)]
OPERATORS: dict[str, Operators] = {
    "native": NativeOperators(NativeThreadPool(2)),
    "torch": TorchOperators(),
}


def weights_of(shape: ConvShape) -> ConvWeights:
    return ConvWeights(shape, noise(shape.channels, shape.kernel), noise(shape.channels, seed=1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operators", OPERATORS)
def test_a_step_computes_the_convolution_as_it_is_defined(operators: str, shape: ConvShape) -> None:
    weights, (before,) = weights_of(shape), states_of(shape)
    y = inputs_of(weights, 9)
    entries = [(4, StateSlots(2, 0)), (5, StateSlots(1, NO_STATE))]
    found, (after,) = run(OPERATORS[operators], weights, y, entries)
    (b, c, x), zeros = y.chunk(3, dim=1), torch.zeros_like(before[0])
    for known, rows, slot in ((before[0], slice(0, 4), 2), (zeros, slice(4, 9), 1)):
        inputs = torch.cat((known, (b * x)[rows]))
        taps, bias = weights.conv[:, None], weights.conv_bias
        mixed = F.conv1d(inputs.t(), taps, bias, groups=shape.channels)
        torch.testing.assert_close(found[rows], mixed.t() * c[rows])
        assert torch.equal(after[slot], inputs[len(inputs) - shape.kernel + 1 :])
    assert torch.equal(after[3:], before[3:])
