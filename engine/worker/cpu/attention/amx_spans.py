"""Scores and weighted values of a span by AMX, for a cache in float16 or bfloat16.

The blocks of `amx_products` are at fixed positions of the context, and tokens that a row does not
see add zeros, so that a row's bits do not depend on what else is in the span.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from numba import njit

from engine.worker.cpu.attention.amx_products import (
    BLOCK,
    LINE,
    NUM_PARTS,
    PART,
    QUARTERS,
    WIDTH,
    X_BLOCK,
    multiply,
    split,
    split_rows,
)
from engine.worker.cpu.attention.kv_pages import ITEM, copy_keys, page_at
from engine.worker.cpu.attention.softmax import SCORES, SPAN, clear
from engine.worker.cpu.intrinsics import int64s
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.packed_tiles import SUMS_BYTES, tile_sums
from engine.worker.cpu.kernels.vectors import LANES
from engine.worker.cpu.kernels.vectors import LINE as CACHE_LINE

PIECE = 2  # blocks of values: their panel stays in the first cache
SCORES_STRIDE = SCORES * BYTES


def scratch_floats(max_rows: int, dim: int) -> int:
    """Floats that a thread needs: a panel, queries, a copy of keys or the places of values,
    alignment."""
    panel = max(dim // BLOCK, PIECE) * max(NUM_PARTS) * PART // BYTES
    return panel + max_rows * dim + LANES * dim + 2 * (SPAN + BLOCK)


@njit(inline="always")
def _aligned(address):
    return (address + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@njit(inline="always")
def _split_keys(cache, pages, at, seen, end, dim, panel, copy):
    """The parts of 16 keys from token `at` on, of those in [seen, end). Keys on several pages are
    copied first."""
    size, then = pages.block_size, at + 2 * LANES
    keys, step = page_at(pages, at // size) + at % size * ITEM, size * ITEM
    ahead = page_at(pages, then // size) + then % size * ITEM
    if at % size + LANES > size:
        copy_keys(cache, pages, at, seen, end, dim, copy)
        keys, step, ahead = copy, LANES * ITEM, copy
    for d in range(0, dim, BLOCK):
        for i in range(LANES):
            first, then = keys + (d + i) * step, ahead + (d + 2 * i) * step
            high = panel + d // BLOCK * NUM_PARTS[cache] * PART + i * LINE
            split(cache, first, first + LANES * step, high, high + PART, then)


@njit(inline="always")
def score_span(cache, pages, seen, start, end, q, dim, scores, rows, scratch):
    """Scores of all rows of q against the keys of [start, end), a multiple of 32; nothing is
    read of pages that end before token `seen`."""
    config, panel = tile_sums() + SUMS_BYTES, _aligned(scratch)
    blocks, stride = dim // BLOCK, dim * BYTES
    x = panel + blocks * NUM_PARTS[cache] * PART
    copy = x + rows * stride
    split_rows(q, stride, dim, rows, x, stride)
    for at in range(start, end, WIDTH):
        for i in range(0, min(WIDTH, end - at), LANES):
            if at + i + LANES > seen:
                _split_keys(cache, pages, at + i, seen, end, dim, panel + i * BYTES, copy)
        out = scores + (at - start) * BYTES
        multiply(cache, x, stride, rows, panel, blocks, out, SCORES_STRIDE, config, 0)


@njit(inline="always")
def _find_values(pages, stride, seen, start, end, found):
    """Store the addresses of the values of [start, end), up to a multiple of 32; behind them is a
    line of zeros, for those before `seen` and after the end."""
    places = int64s(found, SPAN + BLOCK)
    zeros, size = found + (SPAN + BLOCK) * 8, pages.block_size
    number, offset = start // size, start % size
    for i in range((end - start + BLOCK - 1) // BLOCK * BLOCK):
        places[i] = zeros
        if seen <= start + i < end:
            places[i] = page_at(pages, number) + offset * stride * ITEM
        offset += 1
        if offset == size:
            number, offset = number + 1, 0


@njit(inline="always")
def _split_values(cache, places, dimension, panel):
    """The parts of 64 dimensions of a block of values; prefetches those of the next block."""
    for i in range(LANES):
        high, shift = panel + i * LINE, dimension * ITEM
        for quarter in range(QUARTERS):
            first, second = places[i] + shift, places[LANES + i] + shift
            then = places[BLOCK + i + quarter % 2 * LANES] + dimension * ITEM
            split(cache, first, second, high, high + PART, then + quarter // 2 * CACHE_LINE)
            high, shift = high + LANES * BYTES, shift + LANES * ITEM


@njit(inline="always")
def weigh_span(cache, pages, stride, seen, start, end, weights, dim, out, rows, scratch):
    """The values of [start, end), each times its softmax weight, summed per row."""
    blocks = (end - start + BLOCK - 1) // BLOCK
    for row in range(rows):
        beyond = weights + row * SCORES_STRIDE + (end - start) * BYTES
        clear(beyond, blocks * BLOCK - (end - start))
    split_rows(weights, SCORES_STRIDE, blocks * BLOCK, rows, weights, SCORES_STRIDE)
    config, panel = tile_sums() + SUMS_BYTES, _aligned(scratch)
    found = panel + PIECE * NUM_PARTS[cache] * PART
    clear(found + (SPAN + BLOCK) * 8, dim)
    _find_values(pages, stride, seen, start, end, found)
    for d in range(0, dim, WIDTH):
        for begin in range(0, blocks, PIECE):
            count = min(PIECE, blocks - begin)
            for block in range(count):
                places = int64s(found + (begin + block) * BLOCK * 8, 2 * BLOCK)
                _split_values(cache, places, d, panel + block * NUM_PARTS[cache] * PART)
            x, to = weights + begin * X_BLOCK, out + d * BYTES
            multiply(cache, x, SCORES_STRIDE, rows, panel, count, to, dim * BYTES, config, begin)
