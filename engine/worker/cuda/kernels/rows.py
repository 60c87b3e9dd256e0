"""A kernel with one program per row: RMS norm, a gated activation or neither, followed by the
quantization of the row to int8 or fp8 with one scale.

A row is kept in registers, so that it is read once. Everything is computed in float32; what is
quantized is first rounded to the dtype of the activations, as when norm and gate are separate.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.cuda.kernels.fp8 import to_fp8
from engine.worker.cuda.kernels.reference import LARGEST, QuantizedRows

MAX_WIDTH = 32768  # a row up to this width is kept in registers
MAX_GATED_WIDTH = 16384  # a product up to this width is; its two factors are kept as well
SILU, GELU, GELU_TANH = 1, 2, 3
GATES = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
}


@triton.jit
def _normed(x, weight, eps, width, columns, dtype: tl.constexpr):
    mean_square = tl.sum(x * x, axis=0) / width
    factors = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    return (x * (1.0 / tl.sqrt_rn(mean_square + eps)) * factors).to(dtype).to(tl.float32)


@triton.jit
def _activated(x, GATE: tl.constexpr):
    if GATE == 1:
        return x / (1.0 + tl.exp(-x))
    elif GATE == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(y)) = sigmoid(2 y)


@triton.jit
def quantize_kernel(
    x,
    weight,
    values,
    scales,
    x_row,
    width,
    eps,
    MOST: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows. `GATE` 0: no gate, else x has twice `width` columns."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    at = x + row * x_row + columns
    found = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        found = _normed(found, weight, eps, width, columns, x.dtype.element_ty)
    if GATE != 0:
        right = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
        found = (_activated(found, GATE) * right).to(x.dtype.element_ty).to(tl.float32)
    largest = tl.max(tl.abs(found), axis=0)
    scale = tl.where(largest > 0, tl.div_rn(largest, MOST), 1.0)
    scale += tl.sum(found * 0.0, axis=0)  # NaN if the row has NaN or infinity: max ignores NaN
    steps = tl.minimum(tl.maximum(tl.div_rn(found, scale), -MOST), MOST)
    to = values + row * width + columns
    if IS_INT8:
        # adding and subtracting 1.5 * 2**23 rounds to the nearest integer, ties to even
        tl.store(to, ((steps + 12582912.0) - 12582912.0).to(tl.int8), mask=mask)
    else:
        tl.store(to, to_fp8(steps), mask=mask)
    tl.store(scales + row, scale)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """See `reference.quantize_rows`."""
    return _quantize(x, dtype)


def norm_and_quantize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> QuantizedRows:
    """See `reference.norm_and_quantize`."""
    return _quantize(x, dtype, weight, eps)


def gate_and_quantize(name: str, x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """See `reference.gate_and_quantize`."""
    return _quantize(x, dtype, gate=GATES[name])


def _quantize(
    x: Tensor, dtype: torch.dtype, norm: Tensor | None = None, eps: float = 0.0, gate: int = 0
) -> QuantizedRows:
    """Behind a norm with these weights, or behind a gate."""
    count, width = len(x), x.shape[1] // (2 if gate else 1)
    values = torch.empty((count, width), dtype=dtype, device=x.device)
    scales = torch.empty((count, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    quantize_kernel[(count,)](
        x,
        x if norm is None else norm,
        values,
        scales,
        x.stride(0),
        width,
        eps,
        MOST=LARGEST[dtype],
        IS_INT8=dtype == torch.int8,
        HAS_NORM=norm is not None,
        GATE=gate,
        BLOCK=block,
        num_warps=warps_for(block),
        **launch_options(x.device),
    )
    return QuantizedRows(values, scales)


def warps_for(block: int) -> int:
    """Warps such that a thread keeps at most 64 elements of a row."""
    return max(1, min(16, block // 512))
