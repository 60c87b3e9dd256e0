"""Matrix products of 16-bit activations with fp8 weights (e4m3) that have a scale for each run of
inputs of an output: of its channel, or of blocks such as 128 × 128.

Each tile of the inner dimension lies within one run, and its sums are multiplied by the scales of
the run in float32. Weights are widened in registers by moving their bits to those of a float16,
which is the same number divided by 256, so that GPUs without fp8 run the kernel too.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.cuda.kernels.gemm import Epilogue, add_parts
from engine.worker.cuda.kernels.tiling import Tiling

MIN_RUN = 16  # a multiple of it: the inner dimension of a tile


@triton.jit
def widened(bits):
    """The float16 that is the e4m3 number of these bits divided by 256, exactly."""
    wide = bits.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x,
    weight,
    scales,
    out,
    parts,
    bias,
    M,
    N,
    K,
    RUNS,
    x_row,
    out_row,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: blocks of N × blocks of M × splits. With splits, float32 parts `[splits, M, N]` are
    stored, else the finished outputs. `out` is also what is added."""
    wait(IS_DEPENDENT)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS)
    first, end = split * each, tl.minimum((split + 1) * each, tl.cdiv(K, BLOCK_K))
    row_mask, column_mask = rows[:, None] < M, columns[:, None] < N
    x_at = x + rows.to(tl.int64)[:, None] * x_row
    weight_at = weight + columns.to(tl.int64)[:, None] * K
    scales_at = scales + columns.to(tl.int64) * RUNS
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(first, end):
        start = block * BLOCK_K
        k = start + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(x_at + k, mask=row_mask & (k < K), other=0.0)
        bits = tl.load(weight_at + k, mask=column_mask & (k < K), other=0)
        scale = tl.load(scales_at + start // RUN, mask=columns < N, other=0.0) * 256.0
        sums += tl.dot(a, tl.trans(widened(bits).to(a.dtype))) * scale[None, :]
    row, column = rows.to(tl.int64)[:, None], columns[None, :]
    mask = row_mask & (column < N)
    if SPLITS == 1:
        if HAS_BIAS:
            sums += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
        if HAS_ADDED:
            sums += tl.load(out + row * out_row + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * out_row + column, sums.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + (split.to(tl.int64) * M + row) * N + column, sums, mask=mask)


def inner_tile(run: int, width: int, most: int) -> int:
    """The inner dimension of a tile, at most `most`: no tile lies in two runs of `width` inputs.
    0: there is none."""
    if run >= width:
        return most
    largest = run & -run  # power of two
    return min(largest, most) if largest >= MIN_RUN else 0


def product(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    run: int,
    tiling: Tiling,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T` plus bias, added to `add_to` or in a new tensor of the dtype of `x`.

    x `[rows, in]` is bfloat16 or float16, rows may be strided; values e4m3 `[out, in]`; scales
    float32 `[out, runs]`. The inner dimension of `tiling` is one of `inner_tile`.
    """
    rows, width = x.shape
    outputs = len(values)
    out = add_to
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    parts = out
    if tiling.splits > 1:
        parts = torch.empty((tiling.splits, rows, outputs), dtype=torch.float32, device=x.device)
    has = {"HAS_BIAS": bias is not None, "HAS_ADDED": add_to is not None}
    blocks = triton.cdiv(outputs, tiling.block_n), triton.cdiv(rows, tiling.block_m)
    product_kernel[(*blocks, tiling.splits)](
        x,
        values.view(torch.uint8),
        scales,
        out,
        parts,
        out if bias is None else bias,
        rows,
        outputs,
        width,
        scales.shape[1],
        x.stride(0),
        out.stride(0),
        RUN=run,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        SPLITS=tiling.splits,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **has,
        **launch_options(x.device),
    )
    if tiling.splits > 1:
        add_parts(parts, out, Epilogue(bias=bias, add_to=add_to))
    return out
