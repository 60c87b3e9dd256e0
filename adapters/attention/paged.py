"""Kernels of the CPU's paged attention: turn q and k, write k and v into slots, attend in place.

A task is one KV head and a few new tokens of one request, with all query heads that share the
KV head: rows = tokens x group. Scores of all rows against all keys, softmax per row, then the
mix of values. Nothing is gathered. The order of every sum depends on the token's own position.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.native.build import FAST
from engine.worker.native.kernels import exp_float
from engine.worker.native.memory import floats, words
from engine.worker.native.tiles import (
    COLUMNS,
    MIX_WIDTH,
    MOST_ROWS,
    make_dot_tile,
    make_mix_tile,
)

BYTES = 4
TASK_WORDS = 4  # first row, tokens, position of the first, its request's place in the tables

_dot_1, _dot_2, _dot_3 = (make_dot_tile(m, COLUMNS) for m in (1, 2, 3))
_dot_single = make_dot_tile(1, 1)
_mix_1, _mix_2, _mix_3 = (make_mix_tile(m) for m in (1, 2, 3))


class EnterOperands(NamedTuple):
    """Rows of q, k and v as they come from a linear: q and k are turned, k and v stored."""

    slots: int  # [rows] int64
    rows: int
    heads: int
    kv_heads: int
    dim: int
    qkv: int
    stride: int
    cos: int  # [rows, dim / 2], or 0 for no turn
    sin: int
    keys: int
    values: int
    rows_per_chunk: int


@njit(inline="always")
def _turn_head(source, target, cos, sin, half):
    """`target` may be `source`."""
    first, second = floats(source, half), floats(source + half * BYTES, half)
    to_first, to_second = floats(target, half), floats(target + half * BYTES, half)
    for i in range(half):
        a, b = first[i], second[i]
        to_first[i] = a * cos[i] - b * sin[i]
        to_second[i] = b * cos[i] + a * sin[i]


@njit(inline="always")
def _copy(source, target, width):
    source, target = floats(source, width), floats(target, width)
    for i in range(width):
        target[i] = source[i]


def enter(operands, chunk, thread):
    """See `EnterOperands`."""
    a = words(operands, 12)
    rows, heads, kv_heads, dim, per = a[1], a[2], a[3], a[4], a[11]
    slots, half, width = words(a[0], rows), dim // 2, kv_heads * dim
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        q = a[5] + row * a[6] * BYTES
        k = q + heads * dim * BYTES
        v = k + width * BYTES
        place = slots[row] * width * BYTES
        if a[7] == 0:
            _copy(k, a[9] + place, width)
        else:
            cos, sin = (
                floats(a[7] + row * half * BYTES, half),
                floats(a[8] + row * half * BYTES, half),
            )
            for head in range(heads):
                at = q + head * dim * BYTES
                _turn_head(at, at, cos, sin, half)
            for head in range(kv_heads):
                at = head * dim * BYTES
                _turn_head(k + at, a[9] + place + at, cos, sin, half)
        _copy(v, a[10] + place, width)


class AttendOperands(NamedTuple):
    """Tasks x KV heads are the chunks; tensors of keys and values are one layer's pages."""

    kv_heads: int
    group: int
    dim: int
    block_size: int
    window: int  # tokens, 0 for all
    scale: float
    tasks: int  # [tasks, TASK_WORDS] int64
    tables: int  # block ids of all requests, int64
    scratch: int  # of thread 0
    scratch_stride: int  # floats, between threads
    score_stride: int  # floats, between rows of scores
    most_rows: int
    keys: int
    values: int
    q: int
    q_stride: int
    out: int
    out_stride: int


@njit(inline="always")
def _score_rows(keys, key_stride, columns, q, dim, scores, score_stride, rows):
    """Up to four keys against all rows of q."""
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        x, y = q + m * dim * BYTES, scores + m * score_stride * BYTES
        if columns < COLUMNS:
            for row in range(count):
                at, out = x + row * dim * BYTES, y + row * score_stride * BYTES
                _dot_single(keys, key_stride, at, dim, out, score_stride, dim, keys, keys, 0)
        elif count == 3:
            _dot_3(keys, key_stride, x, dim, y, score_stride, dim, keys, keys, 0)
        elif count == 2:
            _dot_2(keys, key_stride, x, dim, y, score_stride, dim, keys, keys, 0)
        else:
            _dot_1(keys, key_stride, x, dim, y, score_stride, dim, keys, keys, 0)
        m += count


@njit(inline="always")
def _mix_rows(p, p_stride, values, value_stride, out, dim, length, rows):
    """Add the values of one block, each times its share, to all rows of out."""
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    whole = dim - dim % MIX_WIDTH
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        share = p + m * p_stride * BYTES
        for i in range(0, whole, MIX_WIDTH):
            v, o = values + i * BYTES, out + (m * dim + i) * BYTES
            if count == 3:
                _mix_3(share, p_stride, v, value_stride, o, dim, length)
            elif count == 2:
                _mix_2(share, p_stride, v, value_stride, o, dim, length)
            else:
                _mix_1(share, p_stride, v, value_stride, o, dim, length)
        if whole < dim:
            for row in range(m, m + count):
                shares = floats(p + row * p_stride * BYTES, length)
                rest = floats(out + (row * dim + whole) * BYTES, dim - whole)
                for t in range(length):
                    v_row = floats(values + (t * value_stride + whole) * BYTES, dim - whole)
                    for i in range(dim - whole):
                        rest[i] += shares[t] * v_row[i]
        m += count


@njit(fastmath={"nnan", "nsz"})
def _largest(values, first, end):
    largest = values[first]
    for i in range(first, end):
        largest = values[i] if values[i] > largest else largest
    return largest


@njit(fastmath=FAST)
def _soften(scores, first, count, length):
    """Softmax over scores[first:first + count], zero elsewhere in [0, length); 1 / the sum."""
    largest = _largest(scores, first, first + count)
    total = np.float32(0)
    for i in range(first, first + count):
        value = exp_float(scores[i] - largest)
        scores[i] = value
        total += value
    for i in range(first):
        scores[i] = 0
    for i in range(first + count, length):
        scores[i] = 0
    return np.float32(1) / total


@njit(inline="always")
def _scale_queries(q, q_stride, head, group, dim, scale, scaled, rows):
    """Queries of a task, row by row and times the scale."""
    for row in range(rows):
        place = (row // group) * q_stride + (head * group + row % group) * dim
        source, target = floats(q + place * BYTES, dim), floats(scaled + row * dim * BYTES, dim)
        for i in range(dim):
            target[i] = source[i] * scale


@njit(inline="always")
def _score_page(page, token_stride, block_size, count, q, dim, scores, score_stride, rows):
    """Scores of all rows against the first `count` keys of a page, or up to three more."""
    whole = block_size - block_size % COLUMNS
    for j in range(0, min(count, whole), COLUMNS):
        at, out = page + j * token_stride * BYTES, scores + j * BYTES
        _score_rows(at, token_stride, COLUMNS, q, dim, out, score_stride, rows)
    for j in range(whole, count):
        at, out = page + j * token_stride * BYTES, scores + j * BYTES
        _score_rows(at, token_stride, 1, q, dim, out, score_stride, rows)


@njit(inline="always")
def _soften_rows(scores, score_stride, rows, group, position, begin, end, window, shares):
    """Softmax of each row over what its token sees of [begin, end); 1 / sums to `shares`."""
    for row in range(rows):
        line = floats(scores + row * score_stride * BYTES, end - begin)
        last = position + row // group + 1
        low = begin if window == 0 else max(begin, last - window)
        shares[row] = _soften(line, low - begin, last - low, end - begin)


@njit(inline="always")
def _write_out(mixed, shares, out, out_stride, head, group, dim, rows):
    for row in range(rows):
        place = (row // group) * out_stride + (head * group + row % group) * dim
        target, sums = floats(out + place * BYTES, dim), floats(mixed + row * dim * BYTES, dim)
        for i in range(dim):
            target[i] = sums[i] * shares[row]


def attend(operands, chunk, thread):
    """See `AttendOperands`."""
    a = words(operands, 18)
    kv_heads, group, dim, block_size, window = a[0], a[1], a[2], a[3], a[4]
    most_rows, score_stride = a[11], a[10]
    task = words(a[6] + (chunk // kv_heads) * TASK_WORDS * 8, TASK_WORDS)
    head = chunk % kv_heads
    first, tokens, position = task[0], task[1], task[2]
    rows, end = tokens * group, position + tokens
    begin = 0 if window == 0 else max(0, position + 1 - window) // block_size * block_size
    table = words(a[7] + task[3] * 8, (end + block_size - 1) // block_size)
    token_stride = kv_heads * dim
    page_bytes = block_size * token_stride * BYTES
    scaled = a[8] + thread * a[9] * BYTES
    mixed = scaled + most_rows * dim * BYTES
    scores = mixed + most_rows * dim * BYTES

    q = a[14] + first * a[15] * BYTES
    _scale_queries(q, a[15], head, group, dim, floats(operands + 40, 1)[0], scaled, rows)
    for start in range(begin, end, block_size):
        page = a[12] + table[start // block_size] * page_bytes + head * dim * BYTES
        out, count = scores + (start - begin) * BYTES, min(block_size, end - start)
        _score_page(page, token_stride, block_size, count, scaled, dim, out, score_stride, rows)

    shares = floats(scaled, rows)  # the scaled queries are used up
    _soften_rows(scores, score_stride, rows, group, position, begin, end, window, shares)
    sums = floats(mixed, rows * dim)
    for i in range(rows * dim):
        sums[i] = 0
    for start in range(begin, end, block_size):
        page = a[13] + table[start // block_size] * page_bytes + head * dim * BYTES
        p, count = scores + (start - begin) * BYTES, min(block_size, end - start)
        _mix_rows(p, score_stride, page, token_stride, mixed, dim, count, rows)
    _write_out(mixed, shares, a[16] + first * a[17] * BYTES, a[17], head, group, dim, rows)


KERNELS = (enter, attend)
