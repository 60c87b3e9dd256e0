"""Products with weights in 4 bits, and these weights in 16 bits.

A decode step is as fast as its weights are read, so the codes become floats in registers. Packed
words lie as a thread block reads them, see `reference.FourBitWeight`: the same bits of both halves
of a word are two neighbouring inputs, and three operations make a pair of floats of them. With
these bits as the last ones of a power of two, an integer code is that power plus the code (Kim et
al., "Who Says Elephants Can't Run", section 3.3); a code of MXFP4 has its own exponent. Codes are
exact in the dtype of the inputs, and each group's sum is scaled in float32. Outputs are the rows of
a tile, so that Hopper's tensor cores take the weights from registers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.cuda.kernels.gemm import Epilogue, add_parts, finished
from engine.worker.cuda.kernels.reference import CHUNK, FourBitWeight, RowBlocks
from engine.worker.cuda.kernels.tiling import Tiling

RUN = tl.constexpr(32)  # inputs of a chunk with the same place in their words
PLACES = tl.constexpr(4)
BFLOAT16_128, FLOAT16_1024 = tl.constexpr(0x43004300), tl.constexpr(0x64006400)  # pairs of them
# Of a number with MXFP4's exponent in the place of this dtype's: two to the difference of biases
BFLOAT16_FACTOR, FLOAT16_FACTOR = tl.constexpr(2.0**126), tl.constexpr(2.0**14)
UNPACKED_OUTPUTS = 64  # per program


@triton.jit
def _decoded(words, PLACE: tl.constexpr, IS_E2M1: tl.constexpr, dtype: tl.constexpr):
    """The numbers of codes at one place of words `[outputs, RUN / 2]`: `[outputs, RUN]`."""
    is_bfloat16: tl.constexpr = dtype == tl.bfloat16
    if IS_E2M1:
        top = words << (12 - 4 * PLACE)  # sign, two bits of exponent and one of mantissa
        magnitude = (top >> 6) & 0x01C001C0 if is_bfloat16 else (top >> 3) & 0x0E000E00
        pairs = (top & -0x7FFF8000) | magnitude
    else:
        power = BFLOAT16_128 if is_bfloat16 else FLOAT16_1024
        pairs = ((words >> (4 * PLACE)) & 0x000F000F) | power
    halves = tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))
    found = halves.reshape(words.shape[0], RUN).to(dtype, bitcast=True)
    if IS_E2M1:
        return (found * (BFLOAT16_FACTOR if is_bfloat16 else FLOAT16_FACTOR)).to(dtype)
    return (found - (128.0 + 8.0 if is_bfloat16 else 1024.0 + 8.0)).to(dtype)


@triton.jit
def _loaded(numbers, mask, IS_E8M0: tl.constexpr):
    """The scales or offsets of a group, float32."""
    found = tl.load(numbers, mask=mask, other=0)
    if IS_E8M0:  # the exponent of a float32; 2**-127 becomes 0
        return (found.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def _added(
    sums,
    words,
    x_at,
    scales_at,
    offsets_at,
    is_row,
    is_output,
    left,
    TOTAL,
    GROUP: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """The sums `[outputs, rows]` with the product of a chunk, of which `left` inputs exist."""
    part, total = tl.zeros_like(sums), tl.zeros([sums.shape[1]], tl.float32)
    for place in tl.static_range(PLACES):
        if (place * RUN) % GROUP == 0:  # early, since loading takes a while
            to_group = (place * RUN) // GROUP * TOTAL
            scale = _loaded(scales_at + to_group, is_output, IS_E2M1)
            if HAS_OFFSETS:
                offset = _loaded(offsets_at + to_group, is_output, False)
        inner = place * RUN + tl.arange(0, RUN)[:, None]
        x = tl.load(x_at + inner, mask=is_row & (inner < left), other=0.0)
        part = tl.dot(_decoded(words, place, IS_E2M1, x.dtype), x, part)
        if HAS_OFFSETS:
            total += tl.sum(x.to(tl.float32), axis=0)
        if (place * RUN + RUN) % GROUP == 0:
            sums += part * scale[:, None]
            part = tl.zeros_like(sums)
            if HAS_OFFSETS:
                sums += total[None, :] * offset[:, None]
                total = tl.zeros_like(total)
    return sums


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x,
    words,
    scales,
    offsets,
    bias,
    out,
    parts,
    blocks,
    M,
    N,
    K,
    TOTAL,
    x_row,
    out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: blocks of N × blocks of M × splits. With splits, float32 parts `[splits, M, N]` are
    stored, else the finished outputs. The weight has `TOTAL` outputs. With `blocks`, see
    `RowBlocks`, these are `N` of each expert, and a block of M uses those of one; without rows it
    does nothing."""
    wait(IS_DEPENDENT)
    first_row, end_row = tl.program_id(1) * BLOCK_M, M
    if HAS_BLOCKS:
        block = blocks + 3 * tl.program_id(1)
        expert, first_row, end_row = tl.load(block), tl.load(block + 1), tl.load(block + 2)
        if first_row >= end_row:
            return
        words += expert * N * (CHUNK // 8)
        scales += expert * N
        offsets += expert * N
        bias += expert * N
    chunks = tl.cdiv(K, CHUNK)
    words_per_chunk = tl.cast(TOTAL, tl.int64) * (CHUNK // 8)
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    each = tl.cdiv(chunks, SPLITS)
    row, column = rows.to(tl.int64)[None, :], columns[:, None]
    is_row, is_column = row < end_row, column < N
    words_at = words + column * (CHUNK // 8) + tl.arange(0, CHUNK // 8)[None, :]
    x_at, groups = x + row * x_row, CHUNK // GROUP
    scales, offsets = scales + columns, offsets + columns
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in range(split * each, tl.minimum((split + 1) * each, chunks)):
        sums = _added(
            sums,
            tl.load(words_at + chunk * words_per_chunk, mask=is_column, other=0),
            x_at + chunk * CHUNK,
            scales + chunk * groups * TOTAL,
            offsets + chunk * groups * TOTAL,
            is_row,
            columns < N,
            K - chunk * CHUNK,
            TOTAL,
            GROUP,
            IS_E2M1,
            HAS_OFFSETS,
        )
    mask = is_row & is_column
    if SPLITS == 1:
        found = finished(
            sums,
            row,
            column,
            is_row,
            is_column,
            out,
            out,
            bias,
            out,
            out_row,
            False,
            HAS_BIAS,
            HAS_ADDED,
        )
        tl.store(out + row * out_row + column, found.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(parts + (split.to(tl.int64) * M + row) * N + column, sums, mask=mask)


@triton.jit
def unpack_kernel(
    words,
    scales,
    offsets,
    out,
    first,
    count,
    K,
    TOTAL,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: blocks of outputs × chunks. Outputs from `first` on in the dtype of `out`."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    columns = first + row
    is_row = (row < count)[:, None]
    at = (chunk * tl.cast(TOTAL, tl.int64) + columns[:, None]) * (CHUNK // 8)
    packed = tl.load(words + at + tl.arange(0, CHUNK // 8)[None, :], mask=is_row, other=0)
    for place in tl.static_range(PLACES):
        k = chunk * CHUNK + place * RUN
        found = _decoded(packed, place, IS_E2M1, out.dtype.element_ty).to(tl.float32)
        at = columns + k // GROUP * TOTAL
        found *= _loaded(scales + at, row < count, IS_E2M1)[:, None]
        if HAS_OFFSETS:
            found += _loaded(offsets + at, row < count, False)[:, None]
        inner = k + tl.arange(0, RUN)[None, :]
        to = out + row.to(tl.int64)[:, None] * K + inner
        tl.store(to, found.to(out.dtype.element_ty), mask=is_row & (inner < K))


def product(
    x: Tensor,
    weight: FourBitWeight,
    tiling: Tiling,
    epilogue: Epilogue,
    blocks: RowBlocks | None = None,
) -> Tensor:
    """`x @ weight.T` in the dtype of x, bfloat16 or float16, with the epilogue's bias and `add_to`.

    Rows of x may be strided. With `blocks` each row uses the outputs of its expert.
    """
    (rows, width), outputs = x.shape, weight.outputs
    num_blocks = triton.cdiv(rows, tiling.block_m)
    if blocks is not None:
        assert tiling.splits == 1, "products of experts are not split"
        outputs, num_blocks = outputs // blocks.num_experts, len(blocks.table)
    out = epilogue.add_to
    if out is None:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    parts = out
    if tiling.splits > 1:
        parts = torch.empty((tiling.splits, rows, outputs), dtype=torch.float32, device=x.device)
    product_kernel[(triton.cdiv(outputs, tiling.block_n), num_blocks, tiling.splits)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        out if epilogue.bias is None else epilogue.bias,
        out,
        parts,
        weight.words if blocks is None else blocks.table,
        rows,
        outputs,
        width,
        weight.outputs,
        x.stride(0),
        out.stride(0),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        CHUNK=CHUNK,
        GROUP=weight.group,
        SPLITS=tiling.splits,
        IS_E2M1=weight.is_e2m1,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=epilogue.bias is not None,
        HAS_ADDED=epilogue.add_to is not None,
        HAS_BLOCKS=blocks is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **launch_options(x.device),
    )
    if tiling.splits > 1:
        add_parts(parts, out, epilogue)
    return out


def unpack(weight: FourBitWeight, outputs: slice, dtype: torch.dtype) -> Tensor:
    """Some outputs of a weight in bfloat16 or float16, `[outputs, inputs]`; rounded once."""
    count = outputs.stop - outputs.start
    found = torch.empty((count, weight.inputs), dtype=dtype, device=weight.words.device)
    num_chunks = len(weight.words)
    unpack_kernel[(triton.cdiv(count, UNPACKED_OUTPUTS), num_chunks)](
        weight.words,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        found,
        outputs.start,
        count,
        weight.inputs,
        weight.outputs,
        BLOCK_N=UNPACKED_OUTPUTS,
        CHUNK=CHUNK,
        GROUP=weight.group,
        IS_E2M1=weight.is_e2m1,
        HAS_OFFSETS=weight.offsets is not None,
        num_warps=4,
        **launch_options(found.device),
    )
    return found
