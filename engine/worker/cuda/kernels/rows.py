"""RMS norm, gated activations, and the quantization of rows to int8 or fp8 with one scale each,
alone or in one launch with the norm or gate before it.

What a norm or a scale is computed from is kept in registers, so that it is read once. Everything is
computed in float32; what is quantized is first rounded to the dtype of the activations, as when
norm and gate are separate. A row's result does not depend on the number of rows.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.cuda.kernels.fp8 import to_fp8
from engine.worker.cuda.kernels.gates import GATES, activated
from engine.worker.cuda.kernels.reference import LARGEST, QuantizedRows

MAX_WIDTH = 32768  # a row up to this width is kept in registers
MAX_PAIR_WIDTH = 16384  # a row up to this width is, with the weights of its norm or its gates
HEADS_ELEMENTS = 1024  # a program norms heads of a row with so many elements together
GATED_COLUMNS = 2048  # per program, where the products are not quantized


@triton.jit
def _normed(x, mean_square, weight, eps, width, columns, dtype: tl.constexpr):
    factors = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    return (x * (1.0 / tl.sqrt_rn(mean_square + eps)) * factors).to(dtype)


@triton.jit
def _gated(at, width, mask, GATE: tl.constexpr, dtype: tl.constexpr):
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
    return (activated(left, GATE) * right).to(dtype)


@triton.jit
def norm_kernel(
    x,
    weight,
    out,
    x_row,
    x_head,
    out_row,
    out_head,
    num_heads,
    width,
    eps,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × blocks of heads."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (head < num_heads) & (columns < width)
    at = x + row * x_row + head * x_head + columns
    found = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    mean_square = (tl.sum(found * found, axis=1) / width)[:, None]
    normed = _normed(found, mean_square, weight, eps, width, columns, out.dtype.element_ty)
    tl.store(out + row * out_row + head * out_head + columns, normed, mask=mask)


@triton.jit
def gate_kernel(
    x,
    out,
    x_row,
    width,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × blocks of columns."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    found = _gated(x + row * x_row + columns, width, mask, GATE, out.dtype.element_ty)
    tl.store(out + row * width + columns, found, mask=mask)


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
    dtype: tl.constexpr = x.dtype.element_ty
    if GATE != 0:
        found = _gated(at, width, mask, GATE, dtype).to(tl.float32)
    else:
        found = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean_square = tl.sum(found * found, axis=0) / width
        found = _normed(found, mean_square, weight, eps, width, columns, dtype).to(tl.float32)
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
    """See `reference.rms_norm`; `[rows, width]` or `[rows, heads, width]`, rows and heads may be
    strided."""
    assert x.stride(-1) == out.stride(-1) == 1, "numbers of a row are adjacent"
    if x.ndim == 2:
        x, out = x[:, None], out[:, None]
    rows, heads, width = x.shape
    block = triton.next_power_of_2(width)
    block_heads = min(triton.next_power_of_2(heads), max(1, HEADS_ELEMENTS // block))
    norm_kernel[(rows, triton.cdiv(heads, block_heads))](
        x,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        heads,
        width,
        eps,
        BLOCK_HEADS=block_heads,
        BLOCK=block,
        num_warps=warps_for(block_heads * block),
        **launch_options(x.device),
    )


def gated(name: str, x: Tensor, out: Tensor) -> None:
    """See `reference.gated`; `[rows, 2 * width]` to `[rows, width]`, rows of x may be strided."""
    assert x.stride(1) == 1, "numbers of a row are adjacent"
    assert out.is_contiguous(), "products are contiguous"
    rows, width = out.shape
    block = min(GATED_COLUMNS, triton.next_power_of_2(width))
    gate_kernel[(rows, triton.cdiv(width, block))](
        x,
        out,
        x.stride(0),
        width,
        GATE=GATES[name],
        BLOCK=block,
        num_warps=warps_for(block),
        **launch_options(x.device),
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
        **launch_options(x.device),
    )
    return QuantizedRows(values, scales)


def warps_for(block: int) -> int:
    """Warps such that a thread keeps at most 64 elements of a row."""
    return max(1, min(16, block // 512))
