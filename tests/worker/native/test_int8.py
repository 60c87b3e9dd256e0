"""Linear layers with 8-bit weights: as near as rounding allows, and a row's bits are its own."""

import pytest
import torch
from torch import Tensor

from engine.worker.native.int8 import Int8Operators, round_weights
from engine.worker.native.int8_kernels import DEPTH, MOST_ACTIVATION, MOST_WEIGHT
from engine.worker.native.team import Team


@pytest.fixture(scope="module")
def operators() -> Int8Operators:
    return Int8Operators(Team(2))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exactly(x: Tensor, weight: Tensor) -> Tensor:
    """The product of `x` and the rounded weights, without rounding `x`."""
    rounded, scales = round_weights([weight], weight.shape[1])
    return x.double() @ (rounded.double() * scales.double()[:, None]).T


SIZES = [(16, 4), (32, 97), (37, 9), (5, 1), (48, 32), (1500, 70), (2100, 33)]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64, 65, 200])
def test_only_the_weights_lose_precision(
    operators: Int8Operators, rows: int, inputs: int, outputs: int
) -> None:
    x, weight, bias = noise(rows, inputs), noise(outputs, inputs, seed=1), noise(outputs, seed=2)
    start = noise(rows, outputs, seed=3)
    expected = exactly(x, weight).float()
    # Half a step of each activation, all in the worst direction.
    bound = float(x.abs().max() / MOST_ACTIVATION * weight.abs().sum(dim=1).max()) + 1e-3
    for shift in (None, bias):
        linear = operators.linear([weight], shift)
        plain = expected if shift is None else expected + shift
        torch.testing.assert_close(linear(x), plain, rtol=1e-4, atol=bound)
        torch.testing.assert_close(linear(x, start.clone()), plain + start, rtol=1e-4, atol=bound)


def test_weights_are_off_by_at_most_half_a_step(operators: Int8Operators) -> None:
    weight = noise(5000, 40) * torch.logspace(-6, 6, 5000)[:, None]
    rounded, scales = round_weights([weight[:1000], weight[1000:]], 64)
    assert rounded.shape == (5000, 64)
    assert not rounded[:, 40:].any()
    assert rounded.abs().amax(dim=1).eq(MOST_WEIGHT).all()
    off = (rounded[:, :40] * scales[:, None] - weight).abs()
    assert (off <= scales[:, None] * 0.5001).all()


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_is_the_same_bits_in_any_company(
    operators: Int8Operators, inputs: int, outputs: int
) -> None:
    linear = operators.linear([noise(outputs, inputs, seed=1)], noise(outputs, seed=2))
    x = noise(150, inputs)
    together = linear(x)
    for first, count in ((0, 1), (1, 2), (3, 3), (6, 31), (37, 100)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


def test_the_largest_sum_fits(operators: Int8Operators) -> None:
    width = 2 * DEPTH
    x, weight = torch.full((4, width), -3.0), torch.full((8, width), 2.0)
    found = operators.linear([weight], None)(x)
    torch.testing.assert_close(found, torch.full((4, 8), -6.0 * width))


def test_rows_of_zeros_and_columns_of_zeros_give_zeros(operators: Int8Operators) -> None:
    x, weight = noise(3, 50), noise(6, 50, seed=1)
    x[1], weight[4] = 0, 0
    found = operators.linear([weight], None)(x)
    assert not found[1].any()
    assert not found[:, 4].any()
    assert found[0, :4].all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(operators: Int8Operators, value: float) -> None:
    x = noise(4, 64)
    x[2, 10] = value
    found = operators.linear([noise(8, 64, seed=1)], None)(x)
    assert not found[2].isfinite().any()
    assert found[[0, 1, 3]].isfinite().all()


def test_rows_may_lie_apart(operators: Int8Operators) -> None:
    whole, weight = noise(9, 100), noise(12, 32, seed=1)
    linear = operators.linear([weight], None)
    assert torch.equal(linear(whole[:, 20:52]), linear(whole[:, 20:52].contiguous()))


def test_linears_over_one_input_are_fused_row_below_row(operators: Int8Operators) -> None:
    x, parts = noise(6, 32), [noise(rows, 32, seed=rows) for rows in (8, 3, 20)]
    alone = [operators.linear([part], None)(x) for part in parts]
    assert torch.equal(operators.linear(parts, None)(x), torch.cat(alone, dim=1))
