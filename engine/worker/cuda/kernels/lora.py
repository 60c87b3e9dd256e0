"""What LoRA adapters add to a linear, for rows that each have an adapter of their own or none.

Each row reads the factors of its adapter, as in Punica's BGMV (Chen et al., arXiv:2310.18547), in
two launches. A table has their addresses, so a captured launch serves adapters that are loaded
later. Sums are float32; a row's result does not depend on others.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait

RANKS = 16  # per program of the first factor, and per iteration of the second
INPUTS = 256  # per iteration of the first factor
COLUMNS = 64  # per program of the second factor


class LoraTable(NamedTuple):
    """Where the adapters' factors for one linear lie; all are contiguous, in the dtype of x."""

    # int64 [slots, 2 + 3 * parts]: the address of the first factor and its ranks; for each part of
    # the linear's outputs the address of the second factor (0: none), its first rank and its ranks
    entries: Tensor
    blocks: Tensor  # int32 [blocks, 4]: part, its first column, first and end column of the block
    max_ranks: int  # the most that a first factor has


@triton.jit
def down_kernel(
    x,
    entries,
    rows,
    inner,
    width,
    x_row,
    entry_size,
    max_ranks,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × blocks of ranks."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    entry = entries + slot * entry_size
    num_ranks = tl.load(entry + 1).to(tl.int32)
    if tl.program_id(1) * RANKS >= num_ranks:
        return
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    address = tl.multiple_of(tl.load(entry), 16)  # as torch allocates
    factor = address.to(tl.pointer_type(x.dtype.element_ty)) + rank[:, None] * width
    is_rank = rank < num_ranks
    found = tl.zeros([RANKS, INPUTS], tl.float32)
    for start in range(0, width, INPUTS):
        column = start + tl.arange(0, INPUTS)[None, :]
        mask = column < width
        number = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(factor + column, mask=is_rank[:, None] & mask, other=0.0)
        found += weight.to(tl.float32) * number
    tl.store(inner + row * max_ranks + rank, tl.sum(found, axis=1), mask=is_rank)


@triton.jit
def up_kernel(
    inner,
    entries,
    rows,
    blocks,
    y,
    y_row,
    entry_size,
    max_ranks,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × blocks of columns."""
    wait(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    block = blocks + tl.program_id(1) * 4
    entry = entries + slot * entry_size + 2 + 3 * tl.load(block)
    address, num_ranks = tl.load(entry), tl.load(entry + 2).to(tl.int32)
    if address == 0:
        return
    column = tl.load(block + 2) + tl.arange(0, COLUMNS)
    is_column = column < tl.load(block + 3)
    factor = address.to(tl.pointer_type(y.dtype.element_ty))
    factor += (column - tl.load(block + 1))[:, None] * num_ranks
    inner += row * max_ranks + tl.load(entry + 1)
    added = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, num_ranks, RANKS):
        rank = start + tl.arange(0, RANKS)
        number = tl.load(inner + rank, mask=rank < num_ranks, other=0.0)
        mask = is_column[:, None] & (rank < num_ranks)[None, :]
        weight = tl.load(factor + rank[None, :], mask=mask, other=0.0).to(tl.float32)
        added += tl.sum(weight * number[None, :], axis=1)
    at = y + row * y_row + column
    before = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    tl.store(at, (before + added).to(y.dtype.element_ty), mask=is_column)


def add_low_rank(x: Tensor, y: Tensor, table: LoraTable, rows: Tensor) -> None:
    """Add to `y` `[rows, out]` what the adapters in the slots `rows` (int64, below 0: none) add to
    the linear's results of `x` `[rows, in]`."""
    count, width = x.shape
    options = launch_options(x.device)
    inner = torch.empty(count, table.max_ranks, dtype=torch.float32, device=x.device)
    down_kernel[(count, triton.cdiv(table.max_ranks, RANKS))](
        x,
        table.entries,
        rows,
        inner,
        width,
        x.stride(0),
        table.entries.stride(0),
        table.max_ranks,
        RANKS=RANKS,
        INPUTS=INPUTS,
        num_warps=4,
        **options,
    )
    up_kernel[(count, len(table.blocks))](
        inner,
        table.entries,
        rows,
        table.blocks,
        y,
        y.stride(0),
        table.entries.stride(0),
        table.max_ranks,
        RANKS=RANKS,
        COLUMNS=COLUMNS,
        num_warps=2,
        **options,
    )
