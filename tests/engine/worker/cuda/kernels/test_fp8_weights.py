"""Products with fp8 weights of checkpoints under Triton's interpreter against float64, in float16:
the interpreter's `dot` does not support bfloat16, for which the kernel is compiled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.tiling import MAX_ROWS_FP8, Tiling, fp8_weight_tiling
from engine.worker.cuda.model.fp8_weights import Fp8WeightLinear
from engine.worker.cuda.model.linears import FastProducts
from engine.worker.weights.formats.fp8 import Fp8Weight
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import bfloat16_noise as noise

kernels = interpreted("fp8_weights")

SMALL = Tiling(16, 16, 32, 1, 4, 3)
SPLIT = Tiling(16, 32, 32, 3, 4, 3)


def a_weight(outputs: int, width: int, run: int) -> Fp8Weight:
    values = noise(outputs, width, seed=1, dtype=torch.float32).to(reference.FP8)
    scales = noise(outputs, -(-width // run), seed=2, dtype=torch.float32)
    return Fp8Weight(values, scales, run)


def multiplied(x: Tensor, weight: Fp8Weight, tiling: Tiling, *after: Tensor | None) -> Tensor:
    tile = kernels.inner_tile(weight.run, weight.shape[1], tiling.block_k)
    tiling = Tiling(tiling.block_m, tiling.block_n, tile, tiling.splits, 4, 3)
    found: Tensor = kernels.product(x, *weight, tiling, *after)
    return found


def test_every_number_is_widened_exactly() -> None:
    """One output has one number of each kind, NaN apart, at the place of the only 1 of a row."""
    numbers = torch.arange(256, dtype=torch.uint8).view(reference.FP8)
    numbers = numbers[numbers.float().isfinite()]
    weight = Fp8Weight(numbers[:, None].repeat(1, 1), torch.ones(len(numbers), 1), 1 << 20)
    found = multiplied(torch.ones(1, 1, dtype=torch.float16), weight, SMALL)
    assert torch.equal(found[0], numbers.half())


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 70),
    width=st.integers(1, 150),
    run=st.sampled_from([16, 32, 48, 64, 128]),
    tiling=st.sampled_from([SMALL, SPLIT]),
)
def test_ragged_shapes_and_runs(
    rows: int, outputs: int, width: int, run: int, tiling: Tiling
) -> None:
    weight = a_weight(outputs, width, run)
    x = noise(rows, 2 * width, dtype=torch.float32)[:, :width].half()
    wanted = reference.product(x, weight.dequantize(), torch.float16)
    torch.testing.assert_close(multiplied(x, weight, tiling), wanted, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT])
@pytest.mark.parametrize("adds", [False, True])
def test_bias_and_residual_follow_in_the_same_launches(tiling: Tiling, adds: bool) -> None:
    weight, x = a_weight(40, 96, 32), noise(5, 96, dtype=torch.float32).half()
    bias, start = noise(40, seed=3).half(), noise(5, 48, seed=4).half()[:, :40]
    wanted = reference.product(
        x, weight.dequantize(), torch.float16, bias=bias, add_to=start if adds else None
    )
    into = start.clone() if adds else None
    found = multiplied(x, weight, tiling, bias, into)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-2)
    assert into is None or found is into


def test_tiles_lie_in_one_run() -> None:
    assert kernels.inner_tile(128, 4096, 128) == 128
    assert kernels.inner_tile(128, 4096, 64) == 64
    assert kernels.inner_tile(48, 4096, 128) == 16
    assert kernels.inner_tile(4096, 4096, 128) == 128, "one run"
    assert kernels.inner_tile(20, 4096, 128) == 0


@pytest.mark.parametrize(("rows", "run"), [(3, 32), (MAX_ROWS_FP8 + 1, 32), (3, 20), (3, 1 << 20)])
def test_a_linear_computes_the_same_by_the_kernel_and_by_torch(rows: int, run: int) -> None:
    """Many rows, and blocks in which no tile lies, are torch's."""
    weight, x = a_weight(40, 96, run), noise(rows, 96, dtype=torch.float32).half()
    bias = noise(40, seed=3).half()
    linear = Fp8WeightLinear(weight, bias, FastProducts(fp8_weights=kernels))
    assert (linear._tiling(rows) is None) == (rows > MAX_ROWS_FP8 or run == 20)
    wanted = reference.product(x, weight.dequantize(), torch.float16, bias=bias)
    for one in (linear, Fp8WeightLinear(weight, bias)):
        torch.testing.assert_close(one(x), wanted, rtol=2e-3, atol=2e-2)
        into = torch.ones(rows, 40, dtype=torch.float16)
        torch.testing.assert_close(one(x, into), wanted + 1, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(
        linear.widened(torch.bfloat16), weight.dequantize().bfloat16(), rtol=0, atol=0
    )


def test_more_rows_have_larger_tiles_up_to_256() -> None:
    assert str(fp8_weight_tiling(1, 4096)) == "16x64x128x4x4x4"
    assert str(fp8_weight_tiling(16, 28672)) == "16x64x128x1x4x4", "enough blocks without splits"
    assert str(fp8_weight_tiling(64, 4096)) == "64x64x128x2x4x4"
    assert str(fp8_weight_tiling(256, 4096)) == "128x64x64x1x8x4"
    assert fp8_weight_tiling(257, 4096) is None
