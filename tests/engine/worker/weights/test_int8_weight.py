"""Weights of 8 bits: near what was rounded, cut without a change, and used alike by all linears."""

import pytest
import torch
from torch import Tensor

from engine.worker.cpu.int8 import BY_BITS, Int8Operators
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.weights.int8_weight import MOST, ROWS_AT_ONCE, Int8Weight, dequantize, quantize


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rounding_is_off_by_half_a_step_at_most() -> None:
    weight = noise(ROWS_AT_ONCE + 3, 20) * torch.logspace(-6, 6, ROWS_AT_ONCE + 3)[:, None]
    found = quantize(weight)
    assert found.values.abs().amax(dim=1).eq(MOST).all()
    assert ((dequantize(found) - weight).abs() <= found.scales[:, None] * 0.5001).all()


def test_rounding_what_is_rounded_changes_nothing() -> None:
    once = quantize(noise(7, 20))
    assert quantize(once) is once
    again = quantize(dequantize(once))
    assert torch.equal(again.values, once.values)
    torch.testing.assert_close(again.scales, once.scales, rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zero() -> None:
    assert not dequantize(quantize(torch.zeros(2, 5))).any()


def test_a_part_is_that_part_of_the_whole() -> None:
    whole = quantize(noise(12, 20))
    part = whole.cut(slice(3, 9), slice(10, 20))
    assert part.shape == (6, 10)
    assert torch.equal(dequantize(part), dequantize(whole)[3:9, 10:20])


# Largest error of a sum of 40 products where the weights are exact: only the activations are
# quantized, each off by at most half of largest / 16383 or largest / 127; in float32 none is.
ACTIVATION_ERRORS = {"torch": 1e-4, "float32": 1e-4, "14": 5e-3, "8": 0.2}


def operators_of(activations: str) -> TorchOperators | NativeOperators:
    if activations == "torch":
        return TorchOperators()
    pool = NativeThreadPool(1)
    if activations == "float32":
        return NativeOperators(pool)
    return Int8Operators(pool, BY_BITS[activations])


@pytest.mark.parametrize("activations", ACTIVATION_ERRORS)
def test_a_linear_takes_int8_weights_beside_float_weights(activations: str) -> None:
    operators, error = operators_of(activations), ACTIVATION_ERRORS[activations]
    parts: list[Tensor | Int8Weight] = [quantize(noise(9, 40)), noise(6, 40, seed=1)]
    x, shift = noise(3, 40, seed=2), noise(15, seed=3)
    found = operators.linear(parts, shift)(x)
    plain = x @ torch.cat([dequantize(part) for part in parts]).T + shift
    off = (found - plain).abs()
    assert off[:, :9].max() < error
    assert off.max() < error + 0.1  # the float weights may be quantized, too


def test_a_linear_of_8_bits_uses_rounded_weights_as_they_are() -> None:
    operators, weight = Int8Operators(NativeThreadPool(1)), noise(40, 64)
    x = noise(5, 64, seed=1)
    assert torch.equal(
        operators.linear([quantize(weight)], None)(x), operators.linear([weight], None)(x)
    )
