"""Kernels that apply RoPE to q and k and write k and v into their KV slots, in the cache's
dtype."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes

import numpy as np
from numba import njit

from engine.worker.cpu.attention.kv_pages import read_layer_pages
from engine.worker.cpu.build import fast_leaf
from engine.worker.cpu.intrinsics import float32s, int64s
from engine.worker.cpu.kernels.dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    ITEM_BYTES,
    store_lanes,
    store_one,
)
from engine.worker.cpu.kernels.elementwise import BYTES, rotate_head
from engine.worker.cpu.kernels.vectors import LANES
from engine.worker.cpu.operands import make_reader, operands

MAX_INT8 = 127


@operands
class RopeWriteOperands(ctypes.Structure):
    """Rows of q, k and v as a linear computes them; without KV heads, of q only."""

    slots: int  # int64 [rows]
    rows: int
    heads: int
    kv_heads: int
    dim: int
    pages: int  # `LayerPages`
    qkv: int
    stride: int  # floats
    half: int  # half of a head's rotated dimensions; 0: no RoPE
    cos: int  # [rows, half]
    sin: int
    rows_per_chunk: int


_rope_write_operands = make_reader(RopeWriteOperands)


@fast_leaf
def _scale_of(numbers):
    """The scale with which the largest magnitude becomes 127; NaN if any number is not finite."""
    largest, nan = np.float32(0), np.float32(0)
    for number in numbers:
        magnitude = abs(number)
        largest = magnitude if magnitude > largest else largest
        nan += number * np.float32(0)
    return largest / np.float32(MAX_INT8) + nan


@njit(inline="always")
def _store_head(dtype, source, target, step, scale_at, dim):
    """Write `dim` floats to places `step` items apart."""
    numbers = float32s(source, dim)
    if dtype == INT8:
        scale = _scale_of(numbers)
        float32s(scale_at, 1)[0] = scale
        inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
        for i in range(dim):
            store_one(dtype, target + i * step, np.rint(numbers[i] * inverse))
    else:
        step_bytes, whole = step * ITEM_BYTES[dtype], dim - dim % LANES
        for i in range(0, whole, LANES):
            store_lanes(dtype, source + i * BYTES, target + i * step_bytes, step_bytes)
        for i in range(whole, dim):
            store_one(dtype, target + i * step_bytes, numbers[i])


@njit(inline="always")
def _rope_write(operands, chunk, dtype):
    a = _rope_write_operands(operands)
    layer = read_layer_pages(a.pages)
    dim, slots, half = a.dim, int64s(a.slots, a.rows), a.half
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        q = a.qkv + row * a.stride * BYTES
        if half != 0:
            cos = float32s(a.cos + row * half * BYTES, half)
            sin = float32s(a.sin + row * half * BYTES, half)
            for head in range(a.heads + a.kv_heads):
                rotate_head(q + head * dim * BYTES, cos, sin, half)
        k = q + a.heads * dim * BYTES
        block, offset = slots[row] // layer.block_size, slots[row] % layer.block_size
        for head in range(a.kv_heads):
            scale = (block * layer.scale_stride + head * layer.block_size + offset) * BYTES
            page, key = block * layer.page_stride + head * layer.head_stride, k + head * dim * BYTES
            target = layer.keys + (page + offset * layer.key_slot_stride) * ITEM_BYTES[dtype]
            _store_head(dtype, key, target, layer.key_stride, layer.key_scales + scale, dim)
            if layer.has_values != 0:
                value = key + a.kv_heads * dim * BYTES
                target = layer.values + (page + offset * layer.slot_stride) * ITEM_BYTES[dtype]
                _store_head(dtype, value, target, 1, layer.value_scales + scale, dim)


def rope_write_float32(operands, chunk, thread):
    """`RopeWriteOperands` with a float32 cache."""
    _rope_write(operands, chunk, FLOAT32)


def rope_write_float16(operands, chunk, thread):
    """`RopeWriteOperands` with a float16 cache."""
    _rope_write(operands, chunk, FLOAT16)


def rope_write_bfloat16(operands, chunk, thread):
    """`RopeWriteOperands` with a bfloat16 cache."""
    _rope_write(operands, chunk, BFLOAT16)


def rope_write_int8(operands, chunk, thread):
    """`RopeWriteOperands` with an int8 cache."""
    _rope_write(operands, chunk, INT8)


BY_DTYPE = (rope_write_float32, rope_write_float16, rope_write_bfloat16, rope_write_int8)
