"""Kernels with one program per row: RMS norm, gated activations, and both or neither followed by
the quantization of the row to int8 or fp8 with one scale.

A row is kept in registers, so that it is read once. Everything is computed in float32; what is
quantized is first rounded to the dtype of the activations, as when norm and gate are separate.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

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
def norm_kernel(
    x, weight, y, x_row, x_head, y_row, y_head, num_heads, width, eps, BLOCK: tl.constexpr
):
    """Grid: rows × heads. Strides are in elements; y may be x."""
    row = (tl.program_id(0) // num_heads).to(tl.int64)
    head = tl.program_id(0) % num_heads
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    found = tl.load(x + row * x_row + head * x_head + columns, mask=mask, other=0.0)
    normed = _normed(found.to(tl.float32), weight, eps, width, columns, x.dtype.element_ty)
    tl.store(y + row * y_row + head * y_head + columns, normed.to(y.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(x, y, x_row, y_row, width, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: rows × blocks of the width."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    at = x + row * x_row + columns
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    product = _activated(left, GATE) * right
    tl.store(y + row * y_row + columns, product.to(y.dtype.element_ty), mask=mask)


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
):
    """Grid: rows. `GATE` 0: no gate, else x has twice `width` columns."""
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `reference.rms_norm`; `[rows, width]` or `[rows, heads, width]`, rows may be strided."""
    width = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(width)
    norm_kernel[(len(x) * num_heads,)](
        x,
        weight,
        out,
        x.stride(0),
        x.stride(-2),
        out.stride(0),
        out.stride(-2),
        num_heads,
        width,
        eps,
        BLOCK=block,
        num_warps=warps_for(block),
    )


def gated(name: str, x: Tensor, out: Tensor) -> None:
    """See `reference.gated`."""
    rows, width = out.shape
    block = min(1024, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    gate_kernel[grid](
        x, out, x.stride(0), out.stride(0), width, GATE=GATES[name], BLOCK=block, num_warps=4
    )


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
    )
    return QuantizedRows(values, scales)


def warps_for(block: int) -> int:
    """Warps such that a thread keeps at most 64 elements of a row."""
    return max(1, min(16, block // 512))
