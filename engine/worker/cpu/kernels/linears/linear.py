"""The linear layer: packed weights times rows of x, for every tile format; in floats.

A chunk is a run of panels. k is cut into the same pieces for any number of rows, and each row has
its own sums, so a row's result has the same bits whatever rows are beside it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes

import numpy as np
from numba import njit

from engine.worker.cpu.intrinsics import float32s
from engine.worker.cpu.kernels.dtypes import (
    BFLOAT16,
    convert_to_bfloat16_lanes,
    store_one,
)
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.amx_tiles import amx_bfloat16_tile, release_tiles
from engine.worker.cpu.kernels.linears.packed_tiles import (
    WIDTH,
    bfloat16_tile,
    float16_tile,
    float32_tile,
    tile_sums,
)
from engine.worker.cpu.kernels.linears.tile_formats import (
    AMX_ROWS,
    HAS_AMX,
    HAS_BFLOAT16,
    MAX_ROWS,
)
from engine.worker.cpu.kernels.linears.tile_formats import BFLOAT16 as BFLOAT16_FORMAT
from engine.worker.cpu.kernels.linears.tile_outputs import add_float_sums
from engine.worker.cpu.kernels.vectors import make_prefetch
from engine.worker.cpu.operands import make_reader, operands

# Rows of x that are multiplied by weights while these are in cache: some tiles of every kind, for
# which weights in groups may be unpacked once. Time on Zen 5, 1 for 48, of 9728 outputs:
#     at once    64 rows of int8, bfloat16, q4_k    128                    512
#         96     0.94, 0.92, 0.96                   1.01, 0.99, 0.99       0.98, 0.97, 0.98
#        144     0.91, 0.92, 0.95                   0.94, 0.92, 0.95       0.98, 0.98, 0.97
# Of int4 on Zen 3 (AVX2) 64, 128, 192 and 512 rows took 0.97 to 1.00 of it with 144, and 0.97 to
# 0.99 with 96. With AMX no more than 96 has been measured.
ROWS_AT_ONCE = 96 if HAS_AMX else 144
FLOAT_DEPTH = 512  # so many products along k are added up in registers
BFLOAT16_DEPTH = 1024 if HAS_BFLOAT16 else FLOAT_DEPTH  # the same bytes of x, or the same bits
# How far ahead of its loads a single tile prefetches. A whole piece ahead (64 KiB of float32) was
# out of the L1 cache again before it was used: 26 to 27 instead of 29 to 35 GB/s for one row of
# float32 on a core of Zen 5, beside other computation; 512 to 2048 and 16384 bytes lie between.
# On two cores of an Intel Xeon 4096 bytes gave 23 GB/s and 2048 gave 29.
PREFETCH_BYTES = 2048 if HAS_AMX else 4096
BFLOAT16_TILE, BFLOAT16_ROWS = (
    (amx_bfloat16_tile, AMX_ROWS) if HAS_AMX else (bfloat16_tile, MAX_ROWS)
)
BFLOAT16_GROUP, BFLOAT16_GROUP_BYTES = BFLOAT16_FORMAT.group, BFLOAT16_FORMAT.lane_bytes * WIDTH


@operands
class LinearOperands(ctypes.Structure):
    """`y[rows, outputs] = x wᵀ + bias`, or `+=` if `adds`; w is packed."""

    weight: int
    weight_scale: int  # float32 [outputs], of quantized weights; else 0
    offset: int  # int32 [pieces of k, panels * WIDTH], subtracted from the sums; or 0
    bias: int
    inputs: int  # padded to a multiple of what the format requires
    outputs: int
    columns: int  # a chunk's columns, whole panels
    x: int
    x_stride: int  # bytes
    x_scale: int  # float32 [rows], of quantized inputs; else 0
    y: int
    y_stride: int  # floats
    rows: int
    adds: int
    threads: int  # threads that share the chunks


_linear_operands = make_reader(LinearOperands)
_prefetch_panel = make_prefetch(WIDTH * BYTES)  # one number for each output channel of a panel


@njit(inline="always")
def first_column(a, chunk):
    """The first column of a chunk: chunk i is beside chunk `i + threads`, not beside `i + 1`.

    So a thread mostly reads one run of memory, and what it prefetches beyond a chunk is its own.
    Otherwise each chunk began with a stall: one row of int4 took 1.14 times as long on Zen 5.
    """
    chunks = (a.outputs + a.columns - 1) // a.columns
    share, rest = chunks // a.threads, chunks % a.threads
    thread, number = chunk % a.threads, chunk // a.threads
    return (thread * share + min(thread, rest) + number) * a.columns


@njit(inline="always")
def begin_row(y, bias, adds):
    """What the products are added to: the bias, and what y holds if `adds`."""
    for n in range(len(y)):
        y[n] = bias[n] + (y[n] if adds != 0 else np.float32(0))


@njit(inline="always")
def _prefetch_outputs(a, n, m, count, offset):
    """Prefetch what `finish` reads and writes for a tile, while the tile reads its weights.

    Otherwise reading weights stops at the end of each panel until these lines arrive.
    """
    shift = n * BYTES
    _prefetch_panel(a.bias + shift)
    if a.weight_scale != 0:
        _prefetch_panel(a.weight_scale + shift)
    if a.offset != 0:
        _prefetch_panel(a.offset + offset * BYTES)
    for row in range(m, m + count):
        _prefetch_panel(a.y + row * a.y_stride * BYTES + shift)


@njit(inline="always")
def multiply(operands, chunk, tile, finish, max_rows, depth, group, group_bytes, x_group_bytes):
    """Compute a chunk of `LinearOperands` with tiles of at most `max_rows`.

    `group` inputs have `group_bytes` in a panel of w, and `x_group_bytes` in a row of x. A tile
    takes in at most `depth` inputs.

    `finish(sums, scales, bias, y, y_stride, columns, rows, is_first, adds)` adds the sums of a
    tile to y; `scales` are the addresses of offsets, weight scales and input scales.
    """
    a = _linear_operands(operands)
    sums = tile_sums()
    panel_bytes = a.inputs // group * group_bytes
    padded = (a.outputs + WIDTH - 1) // WIDTH * WIDTH
    first = first_column(a, chunk)
    last = min(a.outputs, first + a.columns)
    # Few rows: read the weights in the order of their addresses. Many: keep a piece in cache.
    block = WIDTH if a.rows <= ROWS_AT_ONCE else a.columns
    next_chunk = a.weight + (first + a.columns) // WIDTH * panel_bytes
    distance = min(depth, a.inputs) // group * group_bytes  # whatever the last piece of k has
    tiles = (a.rows + max_rows - 1) // max_rows  # the number of tiles in a panel
    for start in range(first, last, block):
        for k in range(0, a.inputs, depth):
            groups = min(depth, a.inputs - k) // group
            piece_bytes = groups * group_bytes
            share, ahead_step = piece_bytes, group_bytes
            if tiles > 1:  # divisions of a single tile took 3 % of one row of int4
                share, ahead_step = piece_bytes // tiles, group_bytes // tiles
            for top in range(0, a.rows, ROWS_AT_ONCE):
                bottom = min(top + ROWS_AT_ONCE, a.rows)
                first_tile = top // max_rows
                here = (bottom - top + max_rows - 1) // max_rows
                for n in range(start, min(start + block, last), WIDTH):
                    weights = a.weight + n // WIDTH * panel_bytes + k // group * group_bytes
                    then = weights + distance  # what this thread reads next
                    if block > WIDTH and k + depth >= a.inputs:
                        then = next_chunk + (n - start) // WIDTH * panel_bytes
                    m = top
                    for left in range(here, 0, -1):  # rows are shared out evenly among tiles
                        count = bottom - m
                        if left > 1:
                            count = (count + left - 1) // left
                        # Of several tiles each prefetches its share of the piece that comes next.
                        ahead = then + share * (first_tile + here - left)
                        if tiles == 1:  # reads every weight once, so only a little before
                            ahead = weights + PREFETCH_BYTES
                        offset = k // depth * padded + n
                        _prefetch_outputs(a, n, m, count, offset)
                        x = a.x + m * a.x_stride + k // group * x_group_bytes
                        tile(weights, x, a.x_stride, count, groups, sums, ahead, ahead_step, tiles)
                        first_scale = a.offset + offset * BYTES
                        scales = first_scale, a.weight_scale + n * BYTES, a.x_scale + m * BYTES
                        y, bias = a.y + (m * a.y_stride + n) * BYTES, a.bias + n * BYTES
                        width = min(WIDTH, a.outputs - n)
                        finish(sums, scales, bias, y, a.y_stride, width, count, k == 0, a.adds)
                        m += count


@njit(inline="always")
def _finish_floats(sums, scales, bias_at, y_at, y_stride, columns, rows, is_first, adds):
    if columns == WIDTH:
        add_float_sums(sums, *scales, bias_at, y_at, y_stride, rows, is_first, adds)
        return
    bias = float32s(bias_at, columns)
    for m in range(rows):
        row = float32s(sums + m * WIDTH * BYTES, columns)
        y = float32s(y_at + m * y_stride * BYTES, columns)
        if is_first:
            begin_row(y, bias, adds)
        for n in range(columns):
            y[n] += row[n]


def linear_float32(operands, chunk, thread):
    """`LinearOperands` with float32 x and weights."""
    multiply(operands, chunk, float32_tile, _finish_floats, MAX_ROWS, FLOAT_DEPTH, 1, 4 * WIDTH, 4)


def linear_float16(operands, chunk, thread):
    """`LinearOperands` with float32 x and float16 weights; the bits of float32 weights."""
    multiply(operands, chunk, float16_tile, _finish_floats, MAX_ROWS, FLOAT_DEPTH, 1, 2 * WIDTH, 4)


def linear_bfloat16(operands, chunk, thread):
    """`LinearOperands` with bfloat16 weights, added in float32. x is bfloat16 too if the CPU has
    instructions for that; else float32, and the result has the bits of float32 weights."""
    tile, rows, depth = BFLOAT16_TILE, BFLOAT16_ROWS, BFLOAT16_DEPTH
    group, group_bytes = BFLOAT16_GROUP, BFLOAT16_GROUP_BYTES
    multiply(operands, chunk, tile, _finish_floats, rows, depth, group, group_bytes, 4)
    release_tiles()


@operands
class InputOperands(ctypes.Structure):
    """`y = x` in another format, each row padded to `padded` items; `scale` if it is quantized.

    The padding is multiplied by zeros; it must be finite.
    """

    x: int
    x_stride: int  # floats
    width: int
    y: int
    padded: int
    scale: int  # float32 [rows], or 0
    group: int  # inputs whose sum stands before them in y; 1: none
    middle: int  # sums are int32 times -middle; 0: sums are float32
    rows: int
    rows_per_chunk: int


input_operands = make_reader(InputOperands)


def convert_to_bfloat16(operands, chunk, thread):
    """`InputOperands` with y in bfloat16, rounded to nearest even."""
    a = input_operands(operands)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        x_at, y = a.x + row * a.x_stride * BYTES, a.y + row * a.padded * 2
        x, whole = float32s(x_at, a.width), convert_to_bfloat16_lanes(x_at, y, a.width)
        for k in range(whole, a.width):
            store_one(BFLOAT16, y + k * 2, x[k])
        for k in range(a.width, a.padded):
            store_one(BFLOAT16, y + k * 2, np.float32(0))
