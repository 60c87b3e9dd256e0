"""Norm, gate and quantization kernels under Triton's interpreter against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.worker.cuda.kernels import reference
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import bfloat16_noise as noise

rows = interpreted("rows")

# The interpreter computes with numpy, which warns of infinity and NaN; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = (torch.bfloat16, torch.float16)
widths = st.sampled_from([1, 5, 16, 48, 64, 100, 896])


def assert_same(found: reference.QuantizedRows, wanted: reference.QuantizedRows) -> None:
    """Scales are equal up to the rounding of the norm or gate, and values up to one step."""
    torch.testing.assert_close(found.scales, wanted.scales, rtol=1e-2, atol=0)
    assert found.values.dtype == wanted.values.dtype
    expanded = [each.values.float() * each.scales for each in (found, wanted)]
    relative = 0.13 if found.values.dtype == reference.FP8 else 0.0  # one step of 3 mantissa bits
    absolute = 2.1 * float(wanted.scales.max())
    torch.testing.assert_close(*expanded, rtol=relative, atol=absolute)


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 5),
    width=widths,
    dtype=st.sampled_from([torch.int8, reference.FP8]),
    size=st.sampled_from([1e-6, 1.0, 300.0]),
)
def test_rows_are_quantized_with_their_own_scale(
    count: int, width: int, dtype: torch.dtype, size: float
) -> None:
    x = noise(count, 2 * width, dtype=torch.bfloat16)[:, :width] * size
    x[0] = 0
    found, wanted = rows.quantize_rows(x, dtype), reference.quantize_rows(x, dtype)
    assert torch.equal(found.scales, wanted.scales)
    assert found.scales[0] == 1
    if dtype == torch.int8:
        assert torch.equal(found.values, wanted.values)
    assert_same(found, wanted)


@pytest.mark.parametrize("dtype", [torch.int8, reference.FP8])
def test_norm_and_gate_are_fused_with_quantization(dtype: torch.dtype) -> None:
    x, weight = noise(5, 96), noise(96, seed=1)
    found = rows.norm_and_quantize(x, weight, 1e-5, dtype)
    assert_same(found, reference.norm_and_quantize(x, weight, 1e-5, dtype))
    for name in rows.GATES:
        found = rows.gate_and_quantize(name, x, dtype)
        assert_same(found, reference.gate_and_quantize(name, x, dtype))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gets_the_scale_nan_and_others_keep_theirs(value: float) -> None:
    x = noise(3, 40)
    before = rows.quantize_rows(x, torch.int8)
    x[1, 7] = value
    after = rows.quantize_rows(x, torch.int8)
    assert after.scales[1].isnan()
    kept: list[Tensor] = [after.scales[[0, 2]], before.scales[[0, 2]]]
    assert torch.equal(*kept)
    assert torch.equal(after.values[[0, 2]], before.values[[0, 2]])
