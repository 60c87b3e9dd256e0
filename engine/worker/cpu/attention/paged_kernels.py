"""Kernels of the CPU's paged attention: they read the pages of the KV cache in place, in any dtype.

A task is one KV head and a few new tokens of one request, with all query heads that share the KV
head: rows = tokens x group. The context is processed in spans at fixed positions: scores of all
rows against the keys of a span, the softmax of each row, the sum of the span's values weighted by
it, then a merge with the result of the spans before. So a row's sums depend on its own position
only, and the spans of a long context may be computed by several threads.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.attention.softmax import (
    SCORES,
    SPAN,
    cap_scores,
    clear,
    merge,
    partial_floats,
    rescale,
    scale_queries,
    softmax_rows,
    write_output,
)
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
from engine.worker.cpu.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_BYTES, load_one
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.vectors import LANES
from engine.worker.cpu.operands import make_reader, operands

_value_tile = make_value_tile(VALUE_ROWS, VALUE_WIDTH)
_narrow_value_tile = make_value_tile(1, LANES)


@operands
class Task(ctypes.Structure):
    """Some new tokens of one request, against the context from `low` up to `high`."""

    first: int  # row of the first token
    tokens: int
    position: int  # of the first token
    table: int  # where the request's block ids begin in the tables
    low: int  # a multiple of SPAN
    high: int
    partial: int  # index of the first span's partial result if they are merged later; else -1


@operands
class AttentionOperands(ctypes.Structure):
    """Chunks are tasks x KV heads; pages are those of one layer."""

    kv_heads: int
    group: int  # query heads of a KV head
    dim: int
    block_size: int
    page_stride: int  # items between blocks of keys or values
    head_stride: int  # items between heads in a block
    slot_stride: int  # items between slots of values
    scale_stride: int  # floats between the scales of blocks
    window: int  # tokens, 0 for all
    ahead: int  # tokens behind itself that a token sees; 0 if attention is causal
    scale: float
    soft_cap: float  # 0: none
    tasks: int  # array of `Task`
    tables: int  # block ids of all requests, int64
    scratch: int  # of thread 0
    scratch_stride: int  # floats, between threads
    max_rows: int
    partials: int  # float32 [spans, kv_heads, partial_floats]
    keys: int
    values: int
    key_scales: int
    value_scales: int
    q: int
    q_stride: int
    out: int
    out_stride: int
    sinks: int  # float32 [heads], or 0


TASK_BYTES = ctypes.sizeof(Task)
_read_task, _read_operands = make_reader(Task), make_reader(AttentionOperands)


def scratch_floats(max_rows: int, dim: int) -> int:
    """Of a thread: scaled queries, scores, a span's partial result, the merged result so far."""
    return max_rows * (dim + SCORES) + 2 * int(partial_floats(max_rows, dim))


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


class KVPages(NamedTuple):
    """The pages of one KV head of a layer, and which of them a request has."""

    base: int
    scales: int
    page_bytes: int  # between pages of a head
    scale_bytes: int
    block_size: int
    table: int  # block ids, int64
    num_pages: int


@njit(inline="always")
def _page(pages, number):
    """Address of page `number` of the request; of the last one for numbers beyond it."""
    block = int64s(pages.table + min(number, pages.num_pages - 1) * 8, 1)[0]
    return pages.base + block * pages.page_bytes


class Keys(NamedTuple):
    """Addresses of 16 keys of a page."""

    address: int
    scales: int
    ahead: int  # of the keys to prefetch


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
        _page(pages, then) + then_offset * ITEM_BYTES[dtype],
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
def _score_span(dtype, pages, start, end, q, dim, scores, rows):
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
def _weigh_span(dtype, pages, stride, start, end, weights, dim, out, rows):
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
        page, ahead = _page(pages, number) + shift, _page(pages, number + 1) + shift
        _weigh_rows(dtype, p, page, stride, out, dim, count, rows, ahead)
        at += count


@njit(inline="always")
def _pages_of(a, task, keys_or_values, scales, dtype, head):
    """The pages of a head of keys or values; `a` are the operands."""
    return KVPages(
        keys_or_values + head * a.head_stride * ITEM_BYTES[dtype],
        scales + head * a.block_size * BYTES,
        a.page_stride * ITEM_BYTES[dtype],
        a.scale_stride * BYTES,
        a.block_size,
        a.tables + task.table * 8,
        (task.high + a.block_size - 1) // a.block_size,
    )


@njit(inline="always")
def _attend(operands, chunk, thread, dtype):
    a = _read_operands(operands)
    task = _read_task(a.tasks + (chunk // a.kv_heads) * TASK_BYTES)
    head, group, dim, max_rows = chunk % a.kv_heads, a.group, a.dim, a.max_rows
    rows, partial_bytes = task.tokens * group, partial_floats(max_rows, dim) * BYTES
    merged = a.scratch + thread * a.scratch_stride * BYTES
    of_span = merged + partial_bytes
    scaled = of_span + partial_bytes
    scores = scaled + max_rows * dim * BYTES

    q = a.q + task.first * a.q_stride * BYTES
    scale_queries(q, a.q_stride, head, group, dim, np.float32(a.scale), scaled, rows)
    clear(merged, partial_floats(max_rows, dim))
    seen = task.low if a.window == 0 else max(task.low, task.position + 1 - a.window)
    seen -= seen % a.block_size % KEYS
    keys = _pages_of(a, task, a.keys, a.key_scales, dtype, head)
    values = _pages_of(a, task, a.values, a.value_scales, dtype, head)
    for begin in range(task.low, task.high, SPAN):
        start, end = max(begin, seen), min(begin + SPAN, task.high)
        partial = of_span
        if task.partial >= 0:
            number = task.partial + (begin - task.low) // SPAN
            partial = a.partials + (number * a.kv_heads + head) * partial_bytes
        stats = partial + max_rows * dim * BYTES
        _score_span(dtype, keys, start, end, scaled, dim, scores, rows)
        if a.soft_cap != 0.0:
            cap_scores(scores, rows, end - start, np.float32(a.soft_cap))
        position, window, ahead = task.position, a.window, a.ahead
        softmax_rows(scores, rows, group, position, start, end, window, ahead, stats, max_rows)
        _weigh_span(dtype, values, a.slot_stride, start, end, scores, dim, partial, rows)
        if task.partial < 0:
            merge(merged, partial, rows, max_rows, dim)
    if task.partial < 0:
        out = a.out + task.first * a.out_stride * BYTES
        sinks = a.sinks + head * group * BYTES if a.sinks != 0 else 0
        write_output(merged, max_rows, out, a.out_stride, head, group, dim, rows, sinks)


def attend_float32(operands, chunk, thread):
    """`AttentionOperands` with a float32 cache."""
    _attend(operands, chunk, thread, FLOAT32)


def attend_float16(operands, chunk, thread):
    """`AttentionOperands` with a float16 cache."""
    _attend(operands, chunk, thread, FLOAT16)


def attend_bfloat16(operands, chunk, thread):
    """`AttentionOperands` with a bfloat16 cache."""
    _attend(operands, chunk, thread, BFLOAT16)


def attend_int8(operands, chunk, thread):
    """`AttentionOperands` with an int8 cache."""
    _attend(operands, chunk, thread, INT8)


def merge_partials(operands, chunk, thread):
    """Merge the spans of tasks that were divided; `Task.low` to `high` is the whole context."""
    a = _read_operands(operands)
    task = _read_task(a.tasks + (chunk // a.kv_heads) * TASK_BYTES)
    head, dim, max_rows = chunk % a.kv_heads, a.dim, a.max_rows
    rows, size = task.tokens * a.group, partial_floats(max_rows, dim)
    merged = a.scratch + thread * a.scratch_stride * BYTES
    clear(merged, size)
    for number in range((task.high - task.low + SPAN - 1) // SPAN):
        partial = a.partials + ((task.partial + number) * a.kv_heads + head) * size * BYTES
        merge(merged, partial, rows, max_rows, dim)
    out = a.out + task.first * a.out_stride * BYTES
    sinks = a.sinks + head * a.group * BYTES if a.sinks != 0 else 0
    write_output(merged, max_rows, out, a.out_stride, head, a.group, dim, rows, sinks)


BY_DTYPE = (attend_float32, attend_float16, attend_bfloat16, attend_int8)
