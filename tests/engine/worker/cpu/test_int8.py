import numpy as np
import pytest
import torch
from torch import Tensor

from engine.worker.cpu.kernels.linears.int8_linear import DEPTH, MAX_8_BITS, MAX_14_BITS
from engine.worker.cpu.linears.int8 import WITH_8_BITS, WITH_14_BITS, Int8Linears
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.weights.formats.int8 import quantize
from tests.engine.worker.cpu.int8_operators import int8_operators
from tests.noise import noise

STEPS = {WITH_14_BITS.name: MAX_14_BITS, WITH_8_BITS.name: MAX_8_BITS}
SIZES = [(16, 4), (32, 97), (37, 9), (5, 1), (48, 32), (1500, 70), (2100, 33)]


@pytest.fixture(scope="module", params=[WITH_14_BITS, WITH_8_BITS], ids=["14_bits", "8_bits"])
def linears(request: pytest.FixtureRequest) -> Int8Linears:
    """Both run on every CPU; the widths without an instruction run in plain vectors."""
    found: Int8Linears = request.param
    return found


@pytest.fixture(scope="module")
def operators(linears: Int8Linears) -> NativeOperators:
    return int8_operators(NativeThreadPool(2), linears)


def expected_linear(x: Tensor, weight: Tensor, bias: Tensor, start: Tensor, most: int) -> Tensor:
    """The same sums in integers, then the same few operations on floats."""
    values, scales = quantize(weight)
    largest = x.abs().amax(dim=1, keepdim=True)
    steps = x * (torch.full_like(largest, most) / largest)
    whole = (steps + torch.where(x >= 0, 0.5, -0.5)).to(torch.int64)
    factor = scales * (largest * float(np.float32(1 / most)))
    y = bias + start
    for k in range(0, x.shape[1], DEPTH):
        sums = whole[:, k : k + DEPTH] @ values[:, k : k + DEPTH].long().T
        y = y + sums.float() * factor
    return y


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 3, 4, 17, 64, 65, 200])
def test_integers_are_added_exactly(
    operators: NativeOperators, linears: Int8Linears, rows: int, inputs: int, outputs: int
) -> None:
    x, weight, bias = noise(rows, inputs), noise(outputs, inputs, seed=1), noise(outputs, seed=2)
    start, none = noise(rows, outputs, seed=3), torch.zeros(rows, outputs)
    linear, most = operators.linear([weight], bias), STEPS[linears.name]
    assert torch.equal(linear(x), expected_linear(x, weight, bias, none, most))
    assert torch.equal(linear(x, start.clone()), expected_linear(x, weight, bias, start, most))
    bare = operators.linear([weight], None)
    assert torch.equal(bare(x), expected_linear(x, weight, torch.zeros(outputs), none, most))


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_has_the_same_bits_beside_any_rows(
    operators: NativeOperators, inputs: int, outputs: int
) -> None:
    linear = operators.linear([noise(outputs, inputs, seed=1)], noise(outputs, seed=2))
    x = noise(150, inputs)
    together = linear(x)
    for first, count in ((0, 1), (1, 2), (3, 3), (6, 31), (37, 100)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


def test_the_largest_sum_fits(operators: NativeOperators) -> None:
    width = 2 * DEPTH
    x, weight = torch.full((4, width), -3.0), torch.full((8, width), 2.0)
    found = operators.linear([weight], None)(x)
    torch.testing.assert_close(found, torch.full((4, 8), -6.0 * width))


def test_rows_of_zeros_and_columns_of_zeros_give_zeros(operators: NativeOperators) -> None:
    x, weight = noise(3, 50), noise(6, 50, seed=1)
    x[1], weight[4] = 0, 0
    found = operators.linear([weight], None)(x)
    assert not found[1].any()
    assert not found[:, 4].any()
    assert found[0, :4].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_nan_or_infinity_gives_no_finite_number(
    operators: NativeOperators, value: float
) -> None:
    x = noise(4, 64)
    x[2, 10] = value
    found = operators.linear([noise(8, 64, seed=1)], None)(x)
    assert not found[2].isfinite().any()
    assert found[[0, 1, 3]].isfinite().all()


def test_rows_may_be_strided(operators: NativeOperators) -> None:
    whole, weight = noise(9, 100), noise(12, 32, seed=1)
    linear = operators.linear([weight], None)
    assert torch.equal(linear(whole[:, 20:52]), linear(whole[:, 20:52].contiguous()))
