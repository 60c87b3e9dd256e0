"""Scores and weighted values of a span by vector registers, for a cache in any dtype.

Keys and values are read in place: a page is multiplied while the next one is prefetched. With
AVX-512 BF16 those of a bfloat16 or int8 cache are multiplied in pairs, neighbours in a key's
dimensions or in the tokens of a block, with queries and weights that are rounded to bfloat16. The
functions have the arguments of those of `amx_spans`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import numpy as np
from numba import njit

from engine.worker.cpu.attention.kv_pages import Keys, copy_keys, keys_at, page_at
from engine.worker.cpu.attention.softmax import SCORES, SPAN, clear, rescale
from engine.worker.cpu.attention.tiles import (
    AHEAD,
    HAS_TWO_TILES,
    KEYS,
    RUN_BYTES,
    RUN_ITEMS,
    RUNS,
    SCORE_ROWS,
    VALUE_ROWS,
    VALUE_WIDTH,
    make_value_tile,
    score_tile,
    score_two_tiles,
)
from engine.worker.cpu.intrinsics import float32s, fma_one, int64s
from engine.worker.cpu.kernels.dtypes import (
    IN_PAIRS,
    ITEM_BYTES,
    WITH_SCALES,
    convert_to_bfloat16_lanes,
    load_one,
)
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.vectors import LANES

WEIGHT_BYTES = (4, 4, 4, 4, 2, 2)  # bytes of a softmax weight, by dtype

_value_tile = make_value_tile(VALUE_ROWS, VALUE_WIDTH)
_narrow_value_tile = make_value_tile(1, LANES)


def scratch_floats(max_rows: int, dim: int) -> int:
    """Floats that a thread needs: rounded queries and a copy of keys, or runs of values."""
    return max(max_rows * dim + KEYS * dim, (SPAN + max(AHEAD) * RUNS) * RUN_BYTES // BYTES)


@njit(inline="always")
def _score_one(dtype, keys, key_stride, scales, q, dim, scores, rows):
    """One key against all rows of q."""
    for row in range(rows):
        line, total = float32s(q + row * dim * BYTES, dim), np.float32(0)
        for d in range(dim):
            key = load_one(dtype, keys + d * key_stride * ITEM_BYTES[dtype])
            total = fma_one(key, line[d], total)
        if dtype in WITH_SCALES:
            total *= float32s(scales, 1)[0]
        float32s(scores + row * SCORES * BYTES, 1)[0] = total


@njit(inline="always")
def _find_runs(dtype, pages, stride, start, end, found):
    """Store the runs of the values of [start, end), and those to prefetch; returns their number.
    In pairs, a last token without a neighbour is its own, with a weight of 0."""
    row_bytes, at, num_runs = stride * ITEM_BYTES[dtype], start, 0
    while at < end:
        number, offset = at // pages.block_size, at % pages.block_size
        count, line = min(end - at, pages.block_size - offset), row_bytes
        if dtype in IN_PAIRS and count % 2 != 0:
            count, line = (count - 1, row_bytes) if count > 1 else (2, 0)
        run = int64s(found + num_runs * RUN_BYTES, RUN_ITEMS)
        run[0], run[1], run[2] = page_at(pages, number) + offset * row_bytes, line, count
        at, num_runs = at + count, num_runs + 1
    for i in range(RUNS * AHEAD[dtype]):
        run = int64s(found + (num_runs + i) * RUN_BYTES, RUN_ITEMS)
        run[0] = page_at(pages, (at + pages.block_size - 1) // pages.block_size + i)
    return num_runs


@njit(inline="always")
def _weigh_rows(dtype, weights, runs, num_runs, out, dim, rows):
    """The values of some runs, each times its softmax weight, summed in all rows of out."""
    groups = (rows + VALUE_ROWS - 1) // VALUE_ROWS
    whole, lanes = dim - dim % VALUE_WIDTH, dim - dim % LANES
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        p = weights + m * SCORES * BYTES
        for i in range(0, whole, VALUE_WIDTH):
            o = out + (m * dim + i) * BYTES
            _value_tile(dtype, count, p, SCORES, runs, num_runs, i * ITEM_BYTES[dtype], o, dim)
        m += count
    for row in range(rows):
        p, line = weights + row * SCORES * BYTES, out + row * dim * BYTES
        for i in range(whole, lanes, LANES):
            column, o = i * ITEM_BYTES[dtype], line + i * BYTES
            _narrow_value_tile(dtype, 1, p, SCORES, runs, num_runs, column, o, dim)
        row_weights, rest = float32s(p, SCORES), float32s(line, dim)
        for i in range(lanes, dim):
            total, t = rest[i], 0
            for number in range(num_runs):
                run = int64s(runs + number * RUN_BYTES, RUN_ITEMS)
                for n in range(run[2]):
                    value = load_one(dtype, run[0] + n * run[1] + i * ITEM_BYTES[dtype])
                    total = fma_one(value, row_weights[t], total)
                    t += 1
            rest[i] = total


@njit(inline="always")
def score_rows(dtype, stride, keys, q, dim, scores, rows):
    """Sixteen keys against all rows of q, which are shared out evenly among tiles."""
    groups = (rows + SCORE_ROWS - 1) // SCORE_ROWS
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        x, y = q + m * dim * BYTES, scores + m * SCORES * BYTES
        k, scales, ahead = keys.address, keys.scales, keys.ahead
        score_tile(dtype, count, stride, x, dim, y, SCORES, dim, k, scales, ahead)
        m += count


@njit(inline="always")
def score_rows_of_two(dtype, stride, a, b, q, dim, scores, rows):
    """The keys of `a` and the next ones, `b`, against all rows of q."""
    groups = (rows + SCORE_ROWS - 1) // SCORE_ROWS
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        x, y = q + m * dim * BYTES, scores + m * SCORES * BYTES
        score_two_tiles(
            dtype, count, stride, x, dim, y, SCORES, dim,
            a.address, b.address, a.scales, b.scales, a.ahead, b.ahead,
        )  # fmt: skip
        m += count


@njit(inline="always")
def round_rows(x, stride, length, rows, target):
    """Rows of floats, rounded to bfloat16 up to a multiple of `LANES`; in place if that is the
    target. `stride` in bytes, of both."""
    for row in range(rows):
        line = row * stride
        convert_to_bfloat16_lanes(x + line, target + line, (length + LANES - 1) // LANES * LANES)


@njit(inline="always")
def score_span(dtype, pages, seen, start, end, q, dim, scores, rows, scratch):
    """Scores of all rows against the keys of [start, end). A tile may run over the end, but stays
    on its page."""
    at, size = start, pages.block_size
    if dtype in IN_PAIRS:
        round_rows(q, dim * BYTES, dim, rows, scratch)
        q, copy = scratch, scratch + rows * dim * BYTES
    while at < end:
        after, out = at + KEYS, scores + (at - start) * BYTES
        if dtype in IN_PAIRS and at % size + KEYS > size:
            copy_keys(dtype, pages, at, seen, end, dim, copy)
            scales = copy + dim * KEYS * ITEM_BYTES[dtype]
            score_rows(dtype, KEYS, Keys(copy, scales, copy), q, dim, out, rows)
            at += KEYS
        elif at % size + KEYS > size:
            key = keys_at(dtype, pages, at, 0)
            _score_one(dtype, key.address, size, key.scales, q, dim, out, rows)
            at += 1
        elif HAS_TWO_TILES and after < end and after % size + KEYS <= size:
            distance = max(size, 2 * KEYS * AHEAD[dtype])
            keys = keys_at(dtype, pages, at, distance)
            next_keys = keys_at(dtype, pages, after, distance)
            score_rows_of_two(dtype, size, keys, next_keys, q, dim, out, rows)
            at += 2 * KEYS
        else:
            keys = keys_at(dtype, pages, at, size * AHEAD[dtype])
            score_rows(dtype, size, keys, q, dim, out, rows)
            at += KEYS


@njit(inline="always")
def _rescale_weights(pages, start, end, weights, rows):
    """Multiply the softmax weights of [start, end) by the scales of the values."""
    at = start
    while at < end:
        number, offset = at // pages.block_size, at % pages.block_size
        count = min(end - at, pages.block_size - offset)
        block = int64s(pages.table + number * 8, 1)[0]
        scales = pages.scales + block * pages.scale_bytes + offset * BYTES
        rescale(weights + (at - start) * BYTES, scales, count, rows)
        at += count


@njit(inline="always")
def weigh_span(dtype, pages, stride, seen, start, end, weights, dim, out, rows, scratch):
    """The values of [start, end), each times its softmax weight, summed per row."""
    if dtype in WITH_SCALES:
        _rescale_weights(pages, start, end, weights, rows)
    if dtype in IN_PAIRS:
        length = end - start
        for row in range(rows):
            clear(weights + (row * SCORES + length) * BYTES, length % 2)
        round_rows(weights, SCORES * BYTES, length, rows, weights)
    clear(out, rows * dim)
    num_runs = _find_runs(dtype, pages, stride, start, end, scratch)
    p = weights
    for number in range(0, num_runs, RUNS):
        count, run = min(RUNS, num_runs - number), scratch + number * RUN_BYTES
        _weigh_rows(dtype, p, run, count, out, dim, rows)
        for i in range(count):
            p += int64s(run + i * RUN_BYTES, RUN_ITEMS)[2] * WEIGHT_BYTES[dtype]
