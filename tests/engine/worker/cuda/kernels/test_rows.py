"""Kernels of norms, gates and quantization under Triton's interpreter against plain torch."""

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


@settings(deadline=None, max_examples=30)
@given(
    shape=st.sampled_from([(1, None), (5, None), (3, 1), (2, 7), (1, 40)]),
    width=widths,
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
)
def test_norms_of_rows_and_heads_that_lie_apart(
    shape: tuple[int, int | None], width: int, dtype: torch.dtype, in_place: bool
) -> None:
    count, heads = shape
    sizes = (count, 2 * width) if heads is None else (count, heads + 2, width + 3)
    whole = noise(*sizes, dtype=dtype)
    x = whole[:, :width] if heads is None else whole[:, 1 : heads + 1, 3:]
    before, weight = whole.clone(), noise(width, seed=1, dtype=dtype)
    wanted = torch.empty_like(x)
    reference.rms_norm(x, weight, 1e-5, wanted)
    found = x if in_place else torch.full_like(x, torch.nan)
    rows.rms_norm(x, weight, 1e-5, found)
    torch.testing.assert_close(found, wanted)
    x.copy_(before[:, :width] if heads is None else before[:, 1 : heads + 1, 3:])
    assert torch.equal(whole, before), "only these rows are written"


def test_a_norm_of_a_row_is_the_same_in_any_company() -> None:
    x, weight = noise(20, 3, 100), noise(100, seed=1)
    together, alone = torch.empty_like(x), torch.empty_like(x[7:8])
    rows.rms_norm(x, weight, 1e-5, together)
    rows.rms_norm(x[7:8], weight, 1e-5, alone)
    assert torch.equal(together[7], alone[0])


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 5),
    width=st.sampled_from([1, 5, 100, 2048, 2500]),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(sorted(rows.GATES)),
)
def test_gates_of_any_width_are_torchs(
    count: int, width: int, dtype: torch.dtype, name: str
) -> None:
    x = 3 * noise(count, 2 * width + 5, dtype=dtype)[:, : 2 * width]
    wanted = torch.empty(count, width, dtype=dtype)
    found = torch.full_like(wanted, torch.nan)
    reference.gated(name, x, wanted)
    rows.gated(name, x, found)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-4)


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
