"""Products of few rows under Triton's interpreter against float64.

In float16 and int8: the interpreter's `dot` does not support bfloat16 and fp8, for which the same
kernels are compiled in `test_compiled` and run in tests/gpu.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.worker.cuda.kernels import reference
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import bfloat16_noise as noise

gemm = interpreted("gemm")

SMALL = gemm.Tiling(16, 16, 32, 1, 4, 3)
SPLIT = gemm.Tiling(16, 32, 32, 3, 4, 3)


def operands(rows: int, outputs: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = (
        noise(rows, 2 * width, dtype=torch.float32)[:, :width],
        noise(outputs, width, seed=1),
    )
    if dtype == torch.int8:
        return (20 * x).to(dtype), (20 * weight).to(dtype)
    return x.to(dtype), weight.to(dtype)


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 70),
    runs=st.integers(1, 12),
    dtype=st.sampled_from([torch.float16, torch.int8]),
    tiling=st.sampled_from([SMALL, SPLIT]),
)
def test_ragged_shapes(
    rows: int, outputs: int, runs: int, dtype: torch.dtype, tiling: object
) -> None:
    x, weight = operands(rows, outputs, runs * 16 // dtype.itemsize, dtype)
    assert gemm.takes(x, weight)
    found = gemm.product(x, weight, tiling, torch.float32, gemm.Epilogue())
    wanted = reference.product(x, weight, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tiling", [SMALL, SPLIT])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize("adds", [False, True])
def test_scales_bias_and_residual_follow_in_the_same_launches(
    tiling: object, dtype: torch.dtype, adds: bool
) -> None:
    x, weight = operands(5, 40, 64, dtype)
    scales = noise(5, 1, dtype=torch.float32), noise(40, 1, seed=2, dtype=torch.float32)
    bias, start = noise(40, seed=3), noise(5, 48, seed=4)[:, :40]
    wanted = reference.product(x, weight, torch.bfloat16, scales, bias, start if adds else None)
    epilogue = gemm.Epilogue(*scales, bias, start.clone() if adds else None)
    found = gemm.product(x, weight, tiling, torch.bfloat16, epilogue)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    if adds:
        assert found is epilogue.add_to


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 20),
    inner=st.integers(1, 40),
    runs=st.integers(1, 12),
    name=st.sampled_from(sorted(gemm.GATES)),
    has_bias=st.booleans(),
)
def test_gated_products_are_those_of_separate_kernels(
    rows: int, inner: int, runs: int, name: str, has_bias: bool
) -> None:
    """With whole numbers, whose sums are exact, and the gate that follows a product."""
    x, weight = (each.round() for each in operands(rows, 2 * inner, 8 * runs, torch.float16))
    weight /= 16
    bias = noise(2 * inner, seed=2, dtype=torch.float16) if has_bias else None
    product = gemm.product(x, weight, SMALL, torch.float16, gemm.Epilogue(bias=bias))
    wanted = torch.empty(rows, inner, dtype=torch.float16)
    interpreted("rows").gated(name, product, wanted)
    found = gemm.gated_product(name, x, weight, SMALL, bias)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("width", [5, 8, 30])
def test_rows_that_a_descriptor_cannot_read_are_padded(width: int) -> None:
    x, weight = operands(3, 20, width, torch.float16)
    x = x[:, 1:] if width == 30 else x  # begins in the middle of 16 bytes
    weight = weight[:, : x.shape[1]]
    assert gemm.takes(x, weight) == (width == 8)
    both = gemm.padded(x), gemm.padded(weight)
    assert gemm.takes(*both)
    found = gemm.product(*both, SMALL, torch.float32, gemm.Epilogue())
    wanted = reference.product(x, weight, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_the_result_of_a_row_does_not_depend_on_the_other_rows() -> None:
    """With whole numbers, whose sums are exact; tests/gpu compares bits of any numbers."""
    x, weight = (each.round() for each in operands(20, 30, 96, torch.float16))
    together = gemm.product(x, weight, SPLIT, torch.float32, gemm.Epilogue())
    for row in (0, 7, 19):
        alone = gemm.product(x[row : row + 1], weight, SPLIT, torch.float32, gemm.Epilogue())
        assert torch.equal(alone[0], together[row])
