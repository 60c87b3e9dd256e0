"""Kernels that turn q and k and write k and v into their slots, rounded to the cache's kind.

Pages of a layer lie head by head: keys `[blocks, heads, dim, slots]`, values `[blocks, heads,
slots, dim]`. In int8 each token and head has a scale, `[blocks, heads, slots]`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

import numpy as np
from numba import njit

from engine.worker.cpu.build import FAST
from engine.worker.cpu.intrinsics import floats, words
from engine.worker.cpu.kernels.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_BYTES, store_one

BYTES = 4
MOST_INT8 = 127


class RopeWriteOperands(NamedTuple):
    """Rows of q, k and v as they come from a linear: q and k are turned, k and v stored."""

    slots: int  # [rows] int64
    rows: int
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    qkv: int
    stride: int
    cos: int  # [rows, dim / 2], or 0 for no turn
    sin: int
    keys: int
    values: int
    key_scales: int
    value_scales: int
    rows_per_chunk: int


@njit
def _turn_head(at, cos, sin, half):
    first, second = floats(at, half), floats(at + half * BYTES, half)
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * cos[i] - b * sin[i]
        second[i] = b * cos[i] + a * sin[i]


@njit(fastmath=FAST)
def _scale_of(numbers):
    """What the largest of the numbers is rounded to 127 by; no number if one of them is none."""
    largest, none = np.float32(0), np.float32(0)
    for number in numbers:
        size = abs(number)
        largest = size if size > largest else largest
        none += number * np.float32(0)
    return largest / np.float32(MOST_INT8) + none


@njit(inline="always")
def _store_head(kind, source, target, step, scale_at, dim):
    """`dim` floats to places `step` items apart."""
    numbers = floats(source, dim)
    if kind == INT8:
        scale = _scale_of(numbers)
        floats(scale_at, 1)[0] = scale
        inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
        for i in range(dim):
            store_one(kind, target + i * step, np.rint(numbers[i] * inverse))
    else:
        for i in range(dim):
            store_one(kind, target + i * step * ITEM_BYTES[kind], numbers[i])


@njit(inline="always")
def _enter(operands, chunk, kind):
    a = words(operands, 15)
    rows, heads, kv_heads, dim, block_size, per = a[1], a[2], a[3], a[4], a[5], a[14]
    slots, half = words(a[0], rows), dim // 2
    for row in range(chunk * per, min(rows, (chunk + 1) * per)):
        q = a[6] + row * a[7] * BYTES
        if a[8] != 0:
            cos = floats(a[8] + row * half * BYTES, half)
            sin = floats(a[9] + row * half * BYTES, half)
            for head in range(heads + kv_heads):
                _turn_head(q + head * dim * BYTES, cos, sin, half)
        k = q + heads * dim * BYTES
        block, offset = slots[row] // block_size, slots[row] % block_size
        for head in range(kv_heads):
            page = (block * kv_heads + head) * block_size
            at, scale = k + head * dim * BYTES, (page + offset) * BYTES
            target = a[10] + (page * dim + offset) * ITEM_BYTES[kind]
            _store_head(kind, at, target, block_size, a[12] + scale, dim)
            target = a[11] + (page + offset) * dim * ITEM_BYTES[kind]
            _store_head(kind, at + kv_heads * dim * BYTES, target, 1, a[13] + scale, dim)


def enter_float32(operands, chunk, thread):
    """See `RopeWriteOperands`."""
    _enter(operands, chunk, FLOAT32)


def enter_float16(operands, chunk, thread):
    """See `RopeWriteOperands`."""
    _enter(operands, chunk, FLOAT16)


def enter_bfloat16(operands, chunk, thread):
    """See `RopeWriteOperands`."""
    _enter(operands, chunk, BFLOAT16)


def enter_int8(operands, chunk, thread):
    """See `RopeWriteOperands`."""
    _enter(operands, chunk, INT8)


KERNELS = ()
OF_KINDS = (enter_float32, enter_float16, enter_bfloat16, enter_int8)
