from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from engine.worker.cuda.kernels import reference, tiling
from engine.worker.cuda.kernels.reference import FP8, quantize_rows
from engine.worker.cuda.model.fusion import LinearWithGate
from engine.worker.cuda.model.linears import (
    INT8_ROWS,
    EightBitLinear,
    FastProducts,
    FloatLinear,
    fp8_linear,
    int8_linear,
    stacked,
)
from engine.worker.cuda.model.operators import FusedGate
from engine.worker.ports import Linear, Weight
from engine.worker.weights.formats.int8 import Int8Weight, quantize
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import bfloat16_noise as noise

Make = Callable[[Sequence[Weight], Tensor | None, torch.dtype], Linear]
FORMATS: dict[str, tuple[Make, float]] = {  # with the largest error, relative to the spread
    "int8": (int8_linear, 0.03),
    "fp8": (fp8_linear, 0.12),
}


def exact(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    y = x.double() @ torch.cat([weight.double() for weight in weights]).T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_rounded_stays_near(name: str, rows: int, with_bias: bool) -> None:
    make, allowed = FORMATS[name]
    x, weights = noise(rows, 64), [noise(48, 64, seed=1), noise(32, 64, seed=2)]
    bias = noise(80, seed=3) if with_bias else None
    linear = make(weights, bias, torch.bfloat16)
    wanted = exact(x, weights, bias)
    found = linear(x)
    assert (found.dtype, found.shape) == (torch.bfloat16, (rows, 80))
    spread = float(exact(noise(500, 64, seed=4), weights, None).std())
    torch.testing.assert_close(found.double(), wanted, rtol=0.01, atol=allowed * spread * 3)
    start = noise(rows, 80, seed=5)
    into = start.clone()
    added = linear(x, into)
    assert added.data_ptr() == into.data_ptr()
    torch.testing.assert_close(
        added.double(), start.double() + found.double(), rtol=0.02, atol=0.02 * spread
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_rounded_by_itself(name: str) -> None:
    linear = FORMATS[name][0]([noise(32, 64)], None, torch.bfloat16)
    x = noise(40, 64, seed=1)
    x[3] *= 1000
    together = linear(x)
    for first, count in ((0, 1), (3, 1), (4, 17), (20, 20)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


def test_int8_is_what_its_integers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch._int_mm

    def as_on_a_gpu(x: Tensor, weight: Tensor) -> Tensor:
        assert len(x) >= INT8_ROWS
        assert x.dtype == weight.dtype == torch.int8
        return multiply(x, weight)

    monkeypatch.setattr(torch, "_int_mm", as_on_a_gpu)
    weight, x = quantize(noise(16, 24, dtype=torch.float32)), noise(3, 24, dtype=torch.float32)
    linear = int8_linear([weight], None, torch.float32)
    assert isinstance(linear, EightBitLinear)
    assert torch.equal(linear.values, weight.values)
    values, scales = quantize_rows(x, torch.int8)
    wanted = (values.float() @ weight.values.float().T) * scales * weight.scales
    assert torch.equal(linear(x), wanted)


def test_sizes_that_tensor_cores_do_not_take_are_expanded() -> None:
    x, weight = noise(4, 20), noise(6, 20, seed=1)
    for make, allowed in FORMATS.values():
        linear = make([weight], None, torch.bfloat16)
        assert isinstance(linear, FloatLinear)
        wanted = exact(x, [weight], None)
        atol = allowed * float(wanted.std()) * 3
        torch.testing.assert_close(linear(x).double(), wanted, rtol=0.01, atol=atol)


def test_fp8_weights_use_the_whole_range_of_their_numbers() -> None:
    weight = noise(32, 64) * 1e-4
    linear = fp8_linear([weight], None, torch.bfloat16)
    assert isinstance(linear, EightBitLinear)
    assert linear.values.dtype is FP8
    assert linear.values.float().abs().amax(dim=1).eq(448).all()
    expanded = linear.values.float() * linear.scales
    # e4m3 has three bits behind the leading one: half a step is a sixteenth
    torch.testing.assert_close(expanded, weight.float(), rtol=1 / 16 + 1e-3, atol=1e-7)


def test_rows_of_zeros_stay_zeros() -> None:
    for make, _ in FORMATS.values():
        linear = make([torch.zeros(16, 32).bfloat16()], None, torch.bfloat16)
        assert not linear(noise(2, 32)).any()
        assert not linear(torch.zeros(2, 32).bfloat16()).any()


def test_rounded_weights_are_expanded_exactly_for_floats() -> None:
    weight = quantize(noise(5000, 8, dtype=torch.float32))
    assert torch.equal(stacked([weight], torch.float32), weight.dequantize())
    both = stacked([weight, noise(3, 8)], torch.bfloat16)
    assert (both.dtype, both.shape) == (torch.bfloat16, (5003, 8))
    assert torch.equal(both[:5000], weight.dequantize().bfloat16())


@pytest.mark.parametrize("name", FORMATS)
def test_rounded_weights_are_taken_by_all_formats(name: str) -> None:
    make, allowed = FORMATS[name]
    weight, x = quantize(noise(32, 64, dtype=torch.float32)), noise(20, 64)
    assert isinstance(weight, Int8Weight)
    found = make([weight], None, torch.bfloat16)(x).double()
    wanted = exact(x, [weight.dequantize()], None)
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=allowed * float(wanted.std()) * 3)


def test_a_float_linear_adds_in_place() -> None:
    x, weight, bias, start = noise(3, 8), noise(4, 8, seed=1), noise(4, seed=2), noise(3, 4, seed=3)
    for shift in (None, bias):
        into = start.clone()
        linear = FloatLinear(weight, shift)
        found = linear(x, into)
        assert found.data_ptr() == into.data_ptr()
        wanted = start.double() + exact(x, [weight], shift)
        torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)


def test_a_gate_behind_a_float_linear_is_computed_with_it_or_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alike: with our kernel up to 128 rows, and by two kernels for more, or in batch-invariant
    mode."""
    monkeypatch.setattr(tiling, "MIN_WIDE", 64)
    rows, gemm = interpreted("rows"), interpreted("gemm")
    x, weight, bias = (noise(*each, dtype=torch.float16) for each in ((129, 32), (64, 32), (64,)))
    launches: list[int] = []
    plain = gemm.gated_product

    def counted(name: str, x: Tensor, *more: object) -> Tensor:
        launches.append(len(x))
        found: Tensor = plain(name, x, *more)
        return found

    monkeypatch.setattr(gemm, "gated_product", counted)
    wanted = torch.empty(129, 32, dtype=torch.float16)
    reference.gated("silu", torch.nn.functional.linear(x, weight, bias), wanted)
    for is_batch_invariant in (False, True):
        fast = FastProducts(rows, gemm, is_batch_invariant=is_batch_invariant)
        linear = LinearWithGate(FloatLinear(weight, bias, fast), FusedGate("silu", rows))
        for count in (1, 16, 64, 128, 129):
            torch.testing.assert_close(linear(x[:count]), wanted[:count], rtol=2e-2, atol=1e-3)
    apart = x.t().contiguous().t()  # torch's, as our kernel reads rows of adjacent numbers
    fast = FastProducts(rows, gemm)
    linear = LinearWithGate(FloatLinear(weight, bias, fast), FusedGate("silu", rows))
    torch.testing.assert_close(linear(apart[:3]), wanted[:3], rtol=2e-2, atol=1e-3)
    assert launches == [1, 16, 64, 128]
