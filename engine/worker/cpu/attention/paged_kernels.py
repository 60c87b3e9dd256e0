"""Kernels of the CPU's paged attention: they read the pages of the KV cache in place, in any dtype.

A task is one KV head and a few new tokens of one request, with all query heads that share the KV
head: rows = tokens x group. The context is processed in spans at fixed positions: scores of all
rows against the keys of a span, the softmax of each row, the sum of the span's values weighted by
it, then a merge with the result of the spans before. So a row's sums depend on its own position
only, and the spans of a long context may be computed by several threads.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
from collections.abc import Callable

import numpy as np
from numba import njit

from engine.worker.cpu.attention import amx_spans, row_spans, vector_spans
from engine.worker.cpu.attention.amx_products import BLOCK, WIDTH
from engine.worker.cpu.attention.kv_pages import KVPages, prefetch_scales, read_layer_pages
from engine.worker.cpu.attention.softmax import (
    SCORES,
    SPAN,
    cap_scores,
    clear,
    merge,
    partial_floats,
    scale_queries,
    softmax_rows,
    write_output,
)
from engine.worker.cpu.attention.tiles import KEYS, VALUE_WIDTH
from engine.worker.cpu.kernels.dtypes import (
    BFLOAT16,
    BFLOAT16_PAIRS,
    FLOAT16,
    FLOAT32,
    HAS_BFLOAT16_PAIRS,
    INT8,
    INT8_PAIRS,
    ITEM_BYTES,
    WITH_SCALES,
)
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.amx_tiles import release_tiles
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX
from engine.worker.cpu.kernels.vectors import LINE
from engine.worker.cpu.operands import make_reader, operands

MIN_GROUP = 6  # query heads of a KV head from which on AMX is used


@operands
class Task(ctypes.Structure):
    """Some new tokens of one request, against the context from `low` up to `high`."""

    first: int  # row of the first token
    tokens: int
    position: int  # the first token's position
    image_end: int  # position behind the image that all tokens belong to; else 0
    table: int  # where the request's block ids begin in the tables
    low: int  # a multiple of SPAN
    high: int
    partial: int  # index of the first span's partial result if they are merged later; else -1


@operands
class AttentionOperands(ctypes.Structure):
    """Chunks are tasks x KV heads."""

    kv_heads: int
    group: int  # query heads of a KV head
    dim: int
    value_dim: int
    pages: int  # `LayerPages`
    window: int  # tokens, 0 for all
    ahead: int  # tokens behind itself that a token sees; 0 if attention is causal
    scale: float
    soft_cap: float  # 0: none
    tasks: int  # array of `Task`
    tables: int  # block ids of all requests, int64
    scratch: int  # thread 0's scratch memory
    scratch_stride: int  # floats, between threads
    max_rows: int
    partials: int  # float32 [spans, kv_heads, partial_floats]
    q: int
    q_stride: int
    out: int
    out_stride: int
    sinks: int  # float32 [heads], or 0


TASK_BYTES = ctypes.sizeof(Task)
_read_task, _read_operands = make_reader(Task), make_reader(AttentionOperands)


def scratch_floats(max_rows: int, dim: int) -> int:
    """Floats that a thread needs: scores, scaled queries, the merged result so far, a span's
    partial result, what is multiplied, alignment."""
    floats = max_rows * (SCORES + dim) + 2 * int(partial_floats(max_rows, dim)) + LINE
    modules = amx_spans, row_spans, vector_spans
    return floats + max(int(each.scratch_floats(max_rows, dim)) for each in modules)


@njit(inline="always")
def _pages_of(layer, tables, task, keys_or_values, scales, dtype, head):
    """The pages of a head of keys or values of a layer."""
    return KVPages(
        keys_or_values + head * layer.head_stride * ITEM_BYTES[dtype],
        scales + head * layer.scale_head_stride * BYTES,
        layer.page_stride * ITEM_BYTES[dtype],
        layer.scale_stride * BYTES,
        layer.block_size,
        tables + task.table * 8,
        (task.high + layer.block_size - 1) // layer.block_size,
    )


@njit(inline="always")
def _attend(operands, chunk, thread, dtype, score, weigh, alignment):
    """`score` and `weigh` are those of a module of spans; what they take of the context begins at a
    multiple of `alignment`."""
    a = _read_operands(operands)
    layer = read_layer_pages(a.pages)
    task = _read_task(a.tasks + (chunk // a.kv_heads) * TASK_BYTES)
    head, group, dim, max_rows = chunk % a.kv_heads, a.group, a.dim, a.max_rows
    width = a.value_dim
    rows, partial_bytes = task.tokens * group, partial_floats(max_rows, width) * BYTES
    scores = (a.scratch + thread * a.scratch_stride * BYTES + LINE - 1) // LINE * LINE
    scaled = scores + max_rows * SCORES * BYTES
    merged = scaled + max_rows * dim * BYTES
    of_span = merged + partial_bytes
    scratch = of_span + partial_bytes

    q = a.q + task.first * a.q_stride * BYTES
    scale_queries(q, a.q_stride, head, group, dim, np.float32(a.scale), scaled, rows)
    clear(merged + max_rows * width * BYTES, 2 * max_rows)
    seen = task.low if a.window == 0 else max(task.low, task.position + 1 - a.window)
    seen -= seen % layer.block_size % KEYS
    keys = _pages_of(layer, a.tables, task, layer.keys, layer.key_scales, dtype, head)
    values = _pages_of(layer, a.tables, task, layer.values, layer.value_scales, dtype, head)
    slot_stride = layer.slot_stride
    for begin in range(task.low, task.high, SPAN):
        start, end = max(begin, seen - seen % alignment), min(begin + SPAN, task.high)
        partial = of_span
        if task.partial >= 0:
            number = task.partial + (begin - task.low) // SPAN
            partial = a.partials + (number * a.kv_heads + head) * partial_bytes
        stats = partial + max_rows * width * BYTES
        if dtype in WITH_SCALES:
            prefetch_scales(dtype, keys, values, start, end)
        score(dtype, keys, seen, start, end, scaled, dim, scores, rows, scratch)
        if a.soft_cap != 0.0:
            cap_scores(scores, rows, end - start, np.float32(a.soft_cap))
        position, image_end, window, ahead = task.position, task.image_end, a.window, a.ahead
        softmax_rows(
            scores, rows, group, position, image_end, start, end, window, ahead, stats, max_rows
        )
        weigh(dtype, values, slot_stride, seen, start, end, scores, width, partial, rows, scratch)
        if task.partial < 0:
            merge(merged, partial, rows, max_rows, width)
    if task.partial < 0:
        out = a.out + task.first * a.out_stride * BYTES
        sinks = a.sinks + head * group * BYTES if a.sinks != 0 else 0
        write_output(merged, max_rows, out, a.out_stride, head, group, width, rows, sinks)


@njit(inline="always")
def _attend_by_vectors(operands, chunk, thread, dtype):
    score, weigh = vector_spans.score_span, vector_spans.weigh_span
    _attend(operands, chunk, thread, dtype, score, weigh, 1)


@njit(inline="always")
def _attend_rows(operands, chunk, thread, dtype, score):
    _attend(operands, chunk, thread, dtype, score, vector_spans.weigh_span, 1)


@njit(inline="always")
def _attend_by_amx(operands, chunk, thread, dtype):
    score, weigh = amx_spans.score_span, amx_spans.weigh_span
    _attend(operands, chunk, thread, dtype, score, weigh, BLOCK)
    release_tiles()


def attend_float32(operands, chunk, thread):
    """`AttentionOperands` with a float32 cache."""
    _attend_by_vectors(operands, chunk, thread, FLOAT32)


def attend_float16(operands, chunk, thread):
    """`AttentionOperands` with a float16 cache."""
    _attend_by_vectors(operands, chunk, thread, FLOAT16)


def attend_bfloat16(operands, chunk, thread):
    """`AttentionOperands` with a bfloat16 cache."""
    _attend_by_vectors(operands, chunk, thread, BFLOAT16)


def attend_bfloat16_in_pairs(operands, chunk, thread):
    """The same by AVX-512 BF16; heads have a multiple of 32 dimensions, blocks an even size."""
    _attend_by_vectors(operands, chunk, thread, BFLOAT16_PAIRS)


def attend_int8(operands, chunk, thread):
    """`AttentionOperands` with an int8 cache."""
    _attend_by_vectors(operands, chunk, thread, INT8)


def attend_int8_in_pairs(operands, chunk, thread):
    """The same by AVX-512 BF16, like `attend_bfloat16_in_pairs`."""
    _attend_by_vectors(operands, chunk, thread, INT8_PAIRS)


def attend_float16_by_amx(operands, chunk, thread):
    """`AttentionOperands` with a float16 cache, whose heads have a multiple of 64 dimensions."""
    _attend_by_amx(operands, chunk, thread, FLOAT16)


def attend_bfloat16_by_amx(operands, chunk, thread):
    """The same with a bfloat16 cache."""
    _attend_by_amx(operands, chunk, thread, BFLOAT16)


def attend_rows_float32(operands, chunk, thread):
    """`AttentionOperands` with a float32 cache of keys of which values are a part."""
    _attend_rows(operands, chunk, thread, FLOAT32, row_spans.score_span)


def attend_rows_float16(operands, chunk, thread):
    """The same with a float16 cache."""
    _attend_rows(operands, chunk, thread, FLOAT16, row_spans.score_span)


def attend_rows_bfloat16(operands, chunk, thread):
    """The same with a bfloat16 cache."""
    _attend_rows(operands, chunk, thread, BFLOAT16, row_spans.score_span)


def attend_rows_int8(operands, chunk, thread):
    """The same with an int8 cache; keys and values have the same scale."""
    _attend_rows(operands, chunk, thread, INT8, row_spans.score_span)


def attend_rows_bfloat16_in_pairs(operands, chunk, thread):
    """The same with a bfloat16 cache by AVX-512 BF16; values have a multiple of 32 dimensions,
    keys an even number, blocks an even size."""
    _attend_rows(operands, chunk, thread, BFLOAT16_PAIRS, row_spans.score_span_in_pairs)


def merge_partials(operands, chunk, thread):
    """Merge the spans of tasks that were divided; `Task.low` to `high` is the whole context."""
    a = _read_operands(operands)
    task = _read_task(a.tasks + (chunk // a.kv_heads) * TASK_BYTES)
    head, dim, max_rows = chunk % a.kv_heads, a.value_dim, a.max_rows
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
BY_DTYPE_IN_PAIRS = {BFLOAT16: attend_bfloat16_in_pairs, INT8: attend_int8_in_pairs}
BY_DTYPE_AND_AMX = {FLOAT16: attend_float16_by_amx, BFLOAT16: attend_bfloat16_by_amx}

ROWS_BY_DTYPE = (
    attend_rows_float32,
    attend_rows_float16,
    attend_rows_bfloat16,
    attend_rows_int8,
)


def attend_rows_kernel(
    dtype: int, dim: int, value_dim: int, block_size: int
) -> Callable[..., None]:
    """The kernel for keys of which values are a part."""
    is_even = value_dim % VALUE_WIDTH == block_size % 2 == dim % 2 == 0
    if HAS_BFLOAT16_PAIRS and dtype == BFLOAT16 and is_even:
        return attend_rows_bfloat16_in_pairs
    return ROWS_BY_DTYPE[dtype]


def attend_kernel(
    dtype: int, group: int = MIN_GROUP, dim: int = WIDTH, block_size: int = KEYS
) -> Callable[..., None]:
    """The kernel for a cache of a dtype, `group` query heads of a KV head and `dim` dimensions.

    A model uses one kernel for all of its steps, since they round differently. By AMX prompts take
    half of the time; but keys and values are split for each request, so that a decode takes longer
    by a fifth if 8 query heads share them, by two thirds if 4 do.
    """
    if HAS_AMX and group >= MIN_GROUP and dim % WIDTH == 0 and dtype in BY_DTYPE_AND_AMX:
        return BY_DTYPE_AND_AMX[dtype]
    if HAS_BFLOAT16_PAIRS and dim % VALUE_WIDTH == block_size % 2 == 0:
        return BY_DTYPE_IN_PAIRS.get(dtype, BY_DTYPE[dtype])
    return BY_DTYPE[dtype]
