import pytest
import torch
from torch import Tensor

from engine.worker.cpu.linears.int8 import WITH_8_BITS, WITH_14_BITS
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import dequantize
from engine.worker.weights.formats.int8 import MAX_INT8, ROWS_AT_ONCE, Int8Weight, quantize
from tests.engine.worker.cpu.int8_operators import int8_operators
from tests.noise import noise


def test_the_quantization_error_is_at_most_half_a_step() -> None:
    weight = noise(ROWS_AT_ONCE + 3, 20) * torch.logspace(-6, 6, ROWS_AT_ONCE + 3)[:, None]
    found = quantize(weight)
    assert found.values.abs().amax(dim=1).eq(MAX_INT8).all()
    assert ((dequantize(found) - weight).abs() <= found.scales[:, None] * 0.5001).all()


def test_quantizing_a_quantized_weight_changes_nothing() -> None:
    once = quantize(noise(7, 20))
    assert quantize(once) is once
    again = quantize(dequantize(once))
    assert torch.equal(again.values, once.values)
    torch.testing.assert_close(again.scales, once.scales, rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zero() -> None:
    assert not dequantize(quantize(torch.zeros(2, 5))).any()


def test_some_rows_are_those_rows_of_the_whole() -> None:
    whole = quantize(noise(12, 20))
    part = whole.rows(slice(3, 9))
    assert part.shape == (6, 20)
    assert torch.equal(dequantize(part), dequantize(whole)[3:9])


# Largest error of a sum of 40 products where the weights are exact: only the activations are
# quantized, each off by at most half of largest / 16383 or largest / 127; in float32 none is.
ACTIVATION_ERRORS = {"torch": 1e-4, "float32": 1e-4, "14": 5e-3, "8": 0.2}


def operators_of(activations: str) -> TorchOperators | NativeOperators:
    if activations == "torch":
        return TorchOperators()
    pool = NativeThreadPool(1)
    if activations == "float32":
        return NativeOperators(pool)
    linears = WITH_8_BITS if activations == "8" else WITH_14_BITS
    return NativeOperators(pool, PackedStore({"int8": linears}))


@pytest.mark.parametrize("with_floats", [False, True])
@pytest.mark.parametrize("activations", ACTIVATION_ERRORS)
def test_a_linear_takes_int8_weights_alone_and_beside_float_weights(
    activations: str, with_floats: bool
) -> None:
    operators, error = operators_of(activations), ACTIVATION_ERRORS[activations]
    first, second = quantize(noise(9, 40)), noise(6, 40, seed=1)
    parts: list[Tensor | Int8Weight] = [first, second if with_floats else quantize(second)]
    x, shift = noise(3, 40, seed=2), noise(15, seed=3)
    found = operators.linear(parts, shift)(x)
    plain = x @ torch.cat([dequantize(part) for part in parts]).T + shift
    assert (found - plain).abs().max() < error


def test_an_int8_linear_uses_quantized_weights_unchanged() -> None:
    operators, weight = int8_operators(NativeThreadPool(1)), noise(40, 64)
    x = noise(5, 64, seed=1)
    assert torch.equal(
        operators.linear([quantize(weight)], None)(x), operators.linear([weight], None)(x)
    )
