"""Kernels of the CPU's paged attention: they attend over pages in place, in any kind of number.

A task is one KV head and a few new tokens of one request, with all query heads that share the
KV head: rows = tokens x group. The context is walked in spans of fixed places: scores of all rows
against the keys of a span, its softmax per row, the mix of its values, then what the spans before
gave is joined with it. So a row's sums depend on its own position alone, and spans of a long
context may be shared out among threads.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.attention.softmax import (
    SCORES,
    SPAN,
    clear,
    join,
    part_floats,
    rescale,
    scale_queries,
    soften_rows,
    write_out,
)
from engine.worker.cpu.attention.tiles import (
    KEYS,
    MIX_ROWS,
    MIX_WIDTH,
    SCORE_ROWS,
    fma_one,
    make_mix_tile,
    make_score_tile,
)
from engine.worker.cpu.intrinsics import floats, words
from engine.worker.cpu.kernels.dot_tiles import LANES
from engine.worker.cpu.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_BYTES, load_one

BYTES = 4
TASK_WORDS = 7  # those of `Task`

_score_1, _score_2, _score_3, _score_4, _score_5, _score_6 = (
    make_score_tile(m) for m in range(1, SCORE_ROWS + 1)
)
_mix_1, _mix_2, _mix_3 = (make_mix_tile(m, MIX_WIDTH) for m in range(1, MIX_ROWS + 1))
_mix_narrow = make_mix_tile(1, LANES)


class Task(NamedTuple):
    """Some new tokens of one request, against the context from `low` up to `high`."""

    first: int  # row of the first token
    tokens: int
    position: int  # of the first token
    place: int  # of the request's table in the tables
    low: int  # a multiple of SPAN
    high: int
    parts: int  # where each span's part goes, if they are joined later; else -1


class AttendOperands(NamedTuple):
    """Tasks x KV heads are the chunks; pages are one layer's."""

    kv_heads: int
    group: int
    dim: int
    block_size: int
    window: int  # tokens, 0 for all
    scale: int  # the bits of a float
    tasks: int  # [tasks, TASK_WORDS] int64
    tables: int  # block ids of all requests, int64
    scratch: int  # of thread 0
    scratch_stride: int  # floats, between threads
    most_rows: int
    parts: int  # [spans, kv_heads, part_floats]
    keys: int
    values: int
    key_scales: int
    value_scales: int
    q: int
    q_stride: int
    out: int
    out_stride: int


def scratch_floats(most_rows: int, dim: int) -> int:
    """Of a thread: scaled queries, scores, a span's part, the parts so far."""
    return most_rows * (dim + SCORES) + 2 * int(part_floats(most_rows, dim))


@njit(inline="always")
def _score_rows(kind, keys, key_stride, scales, q, dim, scores, rows, ahead):
    """Sixteen keys against all rows of q, as evenly shared among tiles as can be."""
    groups = (rows + SCORE_ROWS - 1) // SCORE_ROWS
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        x, y = q + m * dim * BYTES, scores + m * SCORES * BYTES
        if count == 6:
            _score_6(kind, keys, key_stride, scales, x, dim, y, SCORES, dim, ahead)
        elif count == 5:
            _score_5(kind, keys, key_stride, scales, x, dim, y, SCORES, dim, ahead)
        elif count == 4:
            _score_4(kind, keys, key_stride, scales, x, dim, y, SCORES, dim, ahead)
        elif count == 3:
            _score_3(kind, keys, key_stride, scales, x, dim, y, SCORES, dim, ahead)
        elif count == 2:
            _score_2(kind, keys, key_stride, scales, x, dim, y, SCORES, dim, ahead)
        else:
            _score_1(kind, keys, key_stride, scales, x, dim, y, SCORES, dim, ahead)
        m += count


@njit(inline="always")
def _score_one(kind, keys, key_stride, scales, q, dim, scores, rows):
    """One key against all rows of q."""
    for row in range(rows):
        line, total = floats(q + row * dim * BYTES, dim), np.float32(0)
        for d in range(dim):
            key = load_one(kind, keys + d * key_stride * ITEM_BYTES[kind])
            total = fma_one(key, line[d], total)
        if kind == INT8:
            total *= floats(scales, 1)[0]
        floats(scores + row * SCORES * BYTES, 1)[0] = total


@njit(inline="always")
def _score_page(kind, page, block_size, scales, offset, count, q, dim, scores, rows, ahead):
    """Scores of all rows against `count` keys of a page, from slot `offset` on."""
    j = 0
    while j < count:
        shift = (offset + j) * ITEM_BYTES[kind]
        scale, out = scales + (offset + j) * BYTES, scores + j * BYTES
        if offset + j + KEYS <= block_size:
            keys, then = page + shift, ahead + shift
            _score_rows(kind, keys, block_size, scale, q, dim, out, rows, then)
            j += KEYS
        else:
            _score_one(kind, page + shift, block_size, scale, q, dim, out, rows)
            j += 1


@njit(inline="always")
def _mix_rows(kind, p, values, out, dim, length, rows, ahead):
    """Add the values of one page, each times its share, to all rows of out."""
    groups = (rows + MIX_ROWS - 1) // MIX_ROWS
    whole, lanes = dim - dim % MIX_WIDTH, dim - dim % LANES
    m = 0
    for group in range(groups):
        count = (rows - m + groups - group - 1) // (groups - group)
        share = p + m * SCORES * BYTES
        for i in range(0, whole, MIX_WIDTH):
            v, o = values + i * ITEM_BYTES[kind], out + (m * dim + i) * BYTES
            then = ahead + i * ITEM_BYTES[kind]
            if count == 3:
                _mix_3(kind, share, SCORES, v, dim, o, dim, length, then)
            elif count == 2:
                _mix_2(kind, share, SCORES, v, dim, o, dim, length, then)
            else:
                _mix_1(kind, share, SCORES, v, dim, o, dim, length, then)
        m += count
    for row in range(rows):
        share, line = p + row * SCORES * BYTES, out + row * dim * BYTES
        for i in range(whole, lanes, LANES):
            v = values + i * ITEM_BYTES[kind]
            _mix_narrow(kind, share, SCORES, v, dim, line + i * BYTES, dim, length, v)
        shares, rest = floats(share, length), floats(line, dim)
        for i in range(lanes, dim):
            total = rest[i]
            for t in range(length):
                value = load_one(kind, values + (t * dim + i) * ITEM_BYTES[kind])
                total = fma_one(value, shares[t], total)
            rest[i] = total


class KVPages(NamedTuple):
    """One head's pages of a layer, and which of them a request has."""

    base: int
    scales: int
    page_bytes: int  # between pages of a head
    scale_bytes: int
    block_size: int
    table: int  # block ids, int64
    num_pages: int


@njit(inline="always")
def _page(pages, number):
    """Address of page `number` of the request; of the last one for those after it."""
    block = words(pages.table + min(number, pages.num_pages - 1) * 8, 1)[0]
    return pages.base + block * pages.page_bytes


@njit(inline="always")
def _score_span(kind, pages, start, end, q, dim, scores, rows):
    """Scores of all rows against the keys of [start, end)."""
    at = start
    while at < end:
        number, offset = at // pages.block_size, at % pages.block_size
        count = min(end - at, pages.block_size - offset)
        page, ahead = _page(pages, number), _page(pages, number + 1)
        block = words(pages.table + number * 8, 1)[0]
        scales, out = pages.scales + block * pages.scale_bytes, scores + (at - start) * BYTES
        _score_page(kind, page, pages.block_size, scales, offset, count, q, dim, out, rows, ahead)
        at += count


@njit(inline="always")
def _mix_span(kind, pages, start, end, scores, dim, out, rows):
    """Values of [start, end), each times its share, summed up per row."""
    clear(out, rows * dim)
    at = start
    while at < end:
        number, offset = at // pages.block_size, at % pages.block_size
        count = min(end - at, pages.block_size - offset)
        shift, p = offset * dim * ITEM_BYTES[kind], scores + (at - start) * BYTES
        if kind == INT8:
            block = words(pages.table + number * 8, 1)[0]
            rescale(p, pages.scales + block * pages.scale_bytes + offset * BYTES, count, rows)
        page, ahead = _page(pages, number) + shift, _page(pages, number + 1) + shift
        _mix_rows(kind, p, page, out, dim, count, rows, ahead)
        at += count


@njit(inline="always")
def _pages_of(a, keys, scales, kind, head, task):
    """Of keys or values; `a` are the words of `AttendOperands`, `task` those of `Task`."""
    kv_heads, dim, size = a[0], a[2], a[3]
    head_bytes = dim * size * ITEM_BYTES[kind]
    return KVPages(
        keys + head * head_bytes,
        scales + head * size * BYTES,
        kv_heads * head_bytes,
        kv_heads * size * BYTES,
        size,
        a[7] + task[3] * 8,
        (task[5] + size - 1) // size,
    )


@njit(inline="always")
def _attend(operands, chunk, thread, kind):
    a = words(operands, 20)
    kv_heads, group, dim, size, window, most_rows = a[0], a[1], a[2], a[3], a[4], a[10]
    task = words(a[6] + (chunk // kv_heads) * TASK_WORDS * 8, TASK_WORDS)
    head = chunk % kv_heads
    first, tokens, position, low, high = task[0], task[1], task[2], task[4], task[5]
    rows, part_bytes = tokens * group, part_floats(most_rows, dim) * BYTES
    whole = a[8] + thread * a[9] * BYTES
    own = whole + part_bytes
    scaled = own + part_bytes
    scores = scaled + most_rows * dim * BYTES

    q = a[16] + first * a[17] * BYTES
    scale_queries(q, a[17], head, group, dim, floats(operands + 40, 1)[0], scaled, rows)
    clear(whole, part_floats(most_rows, dim))
    seen = low if window == 0 else max(low, position + 1 - window)
    seen -= seen % size % KEYS
    keys = _pages_of(a, a[12], a[14], kind, head, task)
    values = _pages_of(a, a[13], a[15], kind, head, task)
    for begin in range(low, high, SPAN):
        start, end = max(begin, seen), min(begin + SPAN, high)
        part = own
        if task[6] >= 0:
            part = a[11] + ((task[6] + (begin - low) // SPAN) * kv_heads + head) * part_bytes
        stats = part + most_rows * dim * BYTES
        _score_span(kind, keys, start, end, scaled, dim, scores, rows)
        soften_rows(scores, rows, group, position, start, end, window, stats, most_rows)
        _mix_span(kind, values, start, end, scores, dim, part, rows)
        if task[6] < 0:
            join(whole, part, rows, most_rows, dim)
    if task[6] < 0:
        out = a[18] + first * a[19] * BYTES
        write_out(whole, most_rows, out, a[19], head, group, dim, rows)


def attend_float32(operands, chunk, thread):
    """See `AttendOperands`."""
    _attend(operands, chunk, thread, FLOAT32)


def attend_float16(operands, chunk, thread):
    """See `AttendOperands`."""
    _attend(operands, chunk, thread, FLOAT16)


def attend_bfloat16(operands, chunk, thread):
    """See `AttendOperands`."""
    _attend(operands, chunk, thread, BFLOAT16)


def attend_int8(operands, chunk, thread):
    """See `AttendOperands`."""
    _attend(operands, chunk, thread, INT8)


def join_parts(operands, chunk, thread):
    """Of tasks whose spans were shared out: operands as before, and `Task.low` to `high` is all."""
    a = words(operands, 20)
    kv_heads, group, dim, most_rows = a[0], a[1], a[2], a[10]
    task = words(a[6] + (chunk // kv_heads) * TASK_WORDS * 8, TASK_WORDS)
    head, rows, size = chunk % kv_heads, task[1] * group, part_floats(most_rows, dim)
    whole = a[8] + thread * a[9] * BYTES
    clear(whole, size)
    for number in range((task[5] - task[4] + SPAN - 1) // SPAN):
        part = a[11] + ((task[6] + number) * kv_heads + head) * size * BYTES
        join(whole, part, rows, most_rows, dim)
    out = a[18] + task[0] * a[19] * BYTES
    write_out(whole, most_rows, out, a[19], head, group, dim, rows)


KERNELS = (join_parts,)
OF_KINDS = (attend_float32, attend_float16, attend_bfloat16, attend_int8)
