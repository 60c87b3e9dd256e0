"""Scores and weighted values of a span by vector registers, for a cache in any dtype.

Keys and values are read in place: a page is multiplied while the next one is prefetched. The
functions have the arguments of those of `amx_spans`, and need no `seen` and `scratch`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.attention.kv_pages import page_at
from engine.worker.cpu.attention.softmax import SCORES, clear, rescale
from engine.worker.cpu.attention.tiles import (
    HAS_TWO_TILES,
    KEYS,
    SCORE_ROWS,
    VALUE_ROWS,
    VALUE_WIDTH,
    make_value_tile,
    score_tile,
    score_two_tiles,
)
from engine.worker.cpu.intrinsics import float32s, fma_one, int64s
from engine.worker.cpu.kernels.dtypes import INT8, ITEM_BYTES, load_one
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.vectors import LANES

_value_tile = make_value_tile(VALUE_ROWS, VALUE_WIDTH)
_narrow_value_tile = make_value_tile(1, LANES)


@njit(inline="always")
def _score_one(dtype, keys, key_stride, scales, q, dim, scores, rows):
    """One key against all rows of q."""
    for row in range(rows):
        line, total = float32s(q + row * dim * BYTES, dim), np.float32(0)
        for d in range(dim):
            key = load_one(dtype, keys + d * key_stride * ITEM_BYTES[dtype])
            total = fma_one(key, line[d], total)
        if dtype == INT8:
            total *= float32s(scales, 1)[0]
        float32s(scores + row * SCORES * BYTES, 1)[0] = total


@njit(inline="always")
def _weigh_rows(dtype, weights, values, stride, out, dim, length, rows, ahead):
    """Add the values of one page, each times its softmax weight, to all rows of out."""
    groups = (rows + VALUE_ROWS - 1) // VALUE_ROWS
    whole, lanes = dim - dim % VALUE_WIDTH, dim - dim % LANES
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        p = weights + m * SCORES * BYTES
        for i in range(0, whole, VALUE_WIDTH):
            v, o = values + i * ITEM_BYTES[dtype], out + (m * dim + i) * BYTES
            then = ahead + i * ITEM_BYTES[dtype]
            _value_tile(dtype, count, p, SCORES, v, stride, o, dim, length, then)
        m += count
    for row in range(rows):
        p, line = weights + row * SCORES * BYTES, out + row * dim * BYTES
        for i in range(whole, lanes, LANES):
            v = values + i * ITEM_BYTES[dtype]
            _narrow_value_tile(dtype, 1, p, SCORES, v, stride, line + i * BYTES, dim, length, v)
        row_weights, rest = float32s(p, length), float32s(line, dim)
        for i in range(lanes, dim):
            total = rest[i]
            for t in range(length):
                value = load_one(dtype, values + (t * stride + i) * ITEM_BYTES[dtype])
                total = fma_one(value, row_weights[t], total)
            rest[i] = total


class Keys(NamedTuple):
    """Addresses of 16 keys of a page."""

    address: int
    scales: int
    ahead: int  # how far ahead keys are prefetched


@njit(inline="always")
def _keys_at(dtype, pages, at, distance):
    """The keys of 16 tokens of the request from token `at` on, which are on one page; prefetches
    those `distance` tokens further."""
    number, offset = at // pages.block_size, at % pages.block_size
    then, then_offset = (at + distance) // pages.block_size, (at + distance) % pages.block_size
    block = int64s(pages.table + number * 8, 1)[0]
    return Keys(
        pages.base + block * pages.page_bytes + offset * ITEM_BYTES[dtype],
        pages.scales + block * pages.scale_bytes + offset * BYTES,
        page_at(pages, then) + then_offset * ITEM_BYTES[dtype],
    )


@njit(inline="always")
def _score_rows(dtype, stride, keys, q, dim, scores, rows):
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
def _score_rows_of_two(dtype, stride, a, b, q, dim, scores, rows):
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
def score_span(dtype, pages, seen, start, end, q, dim, scores, rows, scratch):
    """Scores of all rows against the keys of [start, end). A tile may run over the end, but stays
    on its page."""
    at, size = start, pages.block_size
    while at < end:
        after, out = at + KEYS, scores + (at - start) * BYTES
        if at % size + KEYS > size:
            key = _keys_at(dtype, pages, at, 0)
            _score_one(dtype, key.address, size, key.scales, q, dim, out, rows)
            at += 1
        elif HAS_TWO_TILES and after < end and after % size + KEYS <= size:
            distance = max(size, 2 * KEYS)
            keys = _keys_at(dtype, pages, at, distance)
            next_keys = _keys_at(dtype, pages, after, distance)
            _score_rows_of_two(dtype, size, keys, next_keys, q, dim, out, rows)
            at += 2 * KEYS
        else:
            keys = _keys_at(dtype, pages, at, size)
            _score_rows(dtype, size, keys, q, dim, out, rows)
            at += KEYS


@njit(inline="always")
def weigh_span(dtype, pages, stride, seen, start, end, weights, dim, out, rows, scratch):
    """The values of [start, end), each times its softmax weight, summed per row."""
    clear(out, rows * dim)
    at = start
    while at < end:
        number, offset = at // pages.block_size, at % pages.block_size
        count = min(end - at, pages.block_size - offset)
        shift, p = offset * stride * ITEM_BYTES[dtype], weights + (at - start) * BYTES
        if dtype == INT8:
            block = int64s(pages.table + number * 8, 1)[0]
            rescale(p, pages.scales + block * pages.scale_bytes + offset * BYTES, count, rows)
        page, ahead = page_at(pages, number) + shift, page_at(pages, number + 1) + shift
        _weigh_rows(dtype, p, page, stride, out, dim, count, rows, ahead)
        at += count
