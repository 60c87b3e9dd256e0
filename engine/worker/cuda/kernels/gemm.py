"""Matrix products of few rows, `x @ weight.T`, with everything that follows in the same launches.

A product of up to 64 rows reads the weight once and computes little, so that it is as fast as the
weight is read. If the outputs give too few thread blocks for all multiprocessors, the inner
dimension is split among several (split-K); a second kernel adds the parts in a fixed order, so that
results are the same in every run. Bias, scales of 8-bit operands and the residual are applied once,
in float32. A gated product multiplies with the rows of the gate and of the other factor at once.
Kernels are not specialized for the number of rows `M`: one that divides by 16 has no faster code.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.cuda.kernels.gates import GATES, activated
from engine.worker.cuda.kernels.tiling import Tiling

ALIGNMENT = 16  # bytes
REDUCED = 1024  # outputs per program of the second kernel


class Epilogue(NamedTuple):
    """What follows the product: scales, bias, and the tensor that the result is added to."""

    x_scales: Tensor | None = None  # float32 [rows, 1]
    weight_scales: Tensor | None = None  # float32 [out] or [out, 1]
    bias: Tensor | None = None  # [out]
    add_to: Tensor | None = None  # [rows, out], overwritten with the sum


@triton.jit
def finished(
    sums,
    row,
    column,
    row_mask,
    column_mask,
    x_scales,
    weight_scales,
    bias,
    added,
    added_row,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    """Scales, bias and residual; `row` and `column` broadcast to the shape of `sums`."""
    found = sums.to(tl.float32)
    if HAS_SCALES:
        found *= tl.load(x_scales + row, mask=row_mask, other=0.0)
        found *= tl.load(weight_scales + column, mask=column_mask, other=0.0)
    if HAS_BIAS:
        found += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        mask = row_mask & column_mask
        found += tl.load(added + row * added_row + column, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x,
    weight,
    out,
    parts,
    x_scales,
    weight_scales,
    bias,
    M,
    N,
    K,
    out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    GATE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: blocks of N × blocks of M × splits. x and the weight are tensor descriptors, which give
    zeros beyond their sizes. With splits, float32 (or int32) parts
    `[splits, M, N]` are stored, else the finished outputs. `out` is also what is added. With `GATE`
    the weight has N rows of the gate and N of the other factor, and there are no splits."""
    wait(IS_DEPENDENT)
    first_row, first_column = tl.program_id(1) * BLOCK_M, tl.program_id(0) * BLOCK_N
    split = tl.program_id(2)
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLITS)
    kind: tl.constexpr = tl.int32 if IS_INT8 else tl.float32
    sums = tl.zeros([BLOCK_M, BLOCK_N], kind)
    others = tl.zeros([BLOCK_M, BLOCK_N], kind)  # sums of the other factor
    for block in range(split * each, tl.minimum((split + 1) * each, blocks)):
        a = x.load([first_row, block * BLOCK_K])
        b = weight.load([first_column, block * BLOCK_K])
        sums = tl.dot(a, tl.trans(b), sums, out_dtype=kind)
        if GATE != 0:
            b = weight.load([N + first_column, block * BLOCK_K])
            others = tl.dot(a, tl.trans(b), others, out_dtype=kind)
    rows, columns = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    row_mask, column_mask = rows[:, None] < M, columns[None, :] < N
    mask = row_mask & column_mask
    row, column = rows.to(tl.int64)[:, None], columns[None, :]
    if GATE != 0:
        found = _gated(
            sums, others, bias, column, column_mask, N, GATE, HAS_BIAS, out.dtype.element_ty
        )
        tl.store(out + row * out_row + column, found, mask=mask)
    elif SPLITS == 1:
        found = finished(
            sums,
            row,
            column,
            row_mask,
            column_mask,
            x_scales,
            weight_scales,
            bias,
            out,
            out_row,
            HAS_SCALES,
            HAS_BIAS,
            HAS_ADDED,
        )
        tl.store(out + row * out_row + column, found.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + (split.to(tl.int64) * M + row) * N + column, sums, mask=mask)


@triton.jit
def _gated(
    sums,
    others,
    bias,
    column,
    column_mask,
    N,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The product of the activated gate and the other factor, both rounded first."""
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)
        others += tl.load(bias + N + column, mask=column_mask, other=0.0).to(tl.float32)
    gate = activated(sums.to(dtype).to(tl.float32), GATE)
    return (gate * others.to(dtype).to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["M"])
def reduce_kernel(
    parts,
    out,
    x_scales,
    weight_scales,
    bias,
    M,
    N,
    out_row,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × blocks of N. Adds the parts in order and finishes the outputs."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    sums = tl.load(parts + row * N + column, mask=mask, other=0)
    for split in range(1, SPLITS):
        sums += tl.load(parts + (split * M + row) * N + column, mask=mask, other=0)
    found = finished(
        sums,
        row,
        column,
        row < M,
        mask,
        x_scales,
        weight_scales,
        bias,
        out,
        out_row,
        HAS_SCALES,
        HAS_BIAS,
        HAS_ADDED,
    )
    tl.store(out + row * out_row + column, found.to(out.dtype.element_ty), mask=mask)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the rows of both begin where a tensor descriptor can read: at multiples of 16
    bytes."""
    return all(
        each.stride(1) == 1
        and each.stride(0) * each.itemsize % ALIGNMENT == each.data_ptr() % ALIGNMENT == 0
        for each in (x, weight)
    )


def padded(matrix: Tensor) -> Tensor:
    """A copy of which `takes` is true, with zeros behind each row."""
    return F.pad(matrix, (0, -matrix.shape[1] % ALIGNMENT)).contiguous()


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What a kernel loads blocks of a matrix from: by Hopper's copy engine (TMA), by pointers on
    GPUs before it."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def gated_product(
    name: str, x: Tensor, weight: Tensor, tiling: Tiling, bias: Tensor | None = None
) -> Tensor:
    """`reference.gated` of `product` with 16-bit floats, in one launch: `[rows, out / 2]`."""
    return product(x, weight, tiling, x.dtype, Epilogue(bias=bias), GATES[name])


def product(
    x: Tensor,
    weight: Tensor,
    tiling: Tiling,
    dtype: torch.dtype,
    epilogue: Epilogue,
    gate: int = 0,
) -> Tensor:
    """`x @ weight.T` with its epilogue: `add_to` with the result added, or a new `[rows, out]`.

    x `[rows, in]` and weight `[out, in]` are of one dtype: bfloat16, float16, int8 or fp8; rows of
    x may be strided. `dtype` is that of a new result. A `gate` is that of `gated_product`.
    """
    rows, width = x.shape
    outputs = len(weight) // (2 if gate else 1)
    assert not gate or tiling.splits == 1, "the factors of a gated product are not split"
    x_scales, weight_scales, bias, add_to = epilogue
    out = add_to
    if out is None:
        out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    parts = out
    if tiling.splits > 1:
        kind = torch.int32 if x.dtype == torch.int8 else torch.float32
        parts = torch.empty((tiling.splits, rows, outputs), dtype=kind, device=x.device)
    has = {
        "HAS_SCALES": x_scales is not None,
        "HAS_BIAS": bias is not None,
        "HAS_ADDED": add_to is not None,
    }
    extras = [out if each is None else each for each in (x_scales, weight_scales, bias)]
    blocks = triton.cdiv(outputs, tiling.block_n), triton.cdiv(rows, tiling.block_m)
    product_kernel[(*blocks, tiling.splits)](
        described(x, tiling.block_m, tiling.block_k),
        described(weight, tiling.block_n, tiling.block_k),
        out,
        parts,
        *extras,
        rows,
        outputs,
        width,
        out.stride(0),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        SPLITS=tiling.splits,
        IS_INT8=x.dtype == torch.int8,
        GATE=gate,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **has,
        **launch_options(x.device),
    )
    if tiling.splits > 1:
        add_parts(parts, out, epilogue)
    return out


def add_parts(parts: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Add the parts `[splits, rows, outputs]` of a product and finish the outputs."""
    splits, rows, outputs = parts.shape
    x_scales, weight_scales, bias, add_to = epilogue
    reduce_kernel[(rows, triton.cdiv(outputs, REDUCED))](
        parts,
        out,
        *[out if each is None else each for each in (x_scales, weight_scales, bias)],
        rows,
        outputs,
        out.stride(0),
        SPLITS=splits,
        BLOCK=REDUCED,
        HAS_SCALES=x_scales is not None,
        HAS_BIAS=bias is not None,
        HAS_ADDED=add_to is not None,
        num_warps=4,
        **launch_options(parts.device),
    )
