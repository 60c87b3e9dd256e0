"""Adds the sums of a tile to a linear's outputs, for a whole panel of columns in vectors.

Loops over a part of a panel are Numba's; these would check in each row which vectors fit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import FLOAT, int64
from engine.worker.cpu.kernels.linears.packed_tiles import VECTORS, WIDTH
from engine.worker.cpu.kernels.vectors import FLOATS, INT32S, LANES, broadcast, pointer

BYTES = 4  # bytes of a sum or an output


class OutputOperands(NamedTuple):
    """The arguments of `add_float_sums` and the like: byte addresses and counts, all int64."""

    sums: ir.Value  # [rows, WIDTH] of 32 bits
    offsets: ir.Value  # int32 [WIDTH]; this and weight scales are of int8 weights only
    weight_scales: ir.Value  # float32 [WIDTH]
    x_scales: ir.Value  # float32 [rows], of quantized inputs only
    bias: ir.Value  # float32 [WIDTH]
    y: ir.Value
    y_stride: ir.Value  # floats
    rows: ir.Value
    is_first: ir.Value  # whether y begins with the bias, plus what y holds if `adds`
    adds: ir.Value


def _make_add(scaled):
    """An intrinsic called with the fields of `OutputOperands`.

    `scaled(builder, a, row, vector, sums)` is what vector number `vector` of a row's sums adds.
    """

    def build(context, builder, signature, args):
        a = OutputOperands(*args)
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        is_first, adds = (builder.icmp_signed("!=", each, int64(0)) for each in a[-2:])
        with cgutils.for_range_slice(builder, int64(0), a.rows, int64(1)) as (row, _):
            y_row = builder.add(a.y, builder.mul(row, builder.mul(a.y_stride, int64(BYTES))))
            for vector in range(VECTORS):
                shift = int64(vector * LANES * BYTES)
                place = pointer(builder, builder.add(y_row, shift), FLOATS)
                y, bias = builder.load(place, align=4), _vector(builder, a.bias, vector, FLOATS)
                begun = builder.fadd(bias, builder.select(adds, y, zero))
                row_sums = builder.add(a.sums, builder.mul(row, int64(WIDTH * BYTES)))
                added = scaled(builder, a, row, vector, row_sums)
                y = builder.fadd(builder.select(is_first, begun, y), added)
                builder.store(y, place, align=4)
        return context.get_dummy_value()

    def add(
        typing, sums, offsets, weight_scales, x_scales, bias, y, y_stride, rows, is_first, adds
    ):
        return types.void(*[types.int64] * len(OutputOperands._fields)), build

    return intrinsic(add)


def _vector(builder, address, vector, kind):
    """Vector number `vector` of a panel's columns at an address."""
    at = builder.add(address, int64(vector * LANES * BYTES))
    return builder.load(pointer(builder, at, kind), align=4)


def _floats(builder, a, row, vector, sums):
    return _vector(builder, sums, vector, FLOATS)


def _x_scale(builder, a, row):
    at = builder.add(a.x_scales, builder.mul(row, int64(BYTES)))
    return broadcast(builder, builder.load(pointer(builder, at, FLOAT), align=4))


def _scaled_floats(builder, a, row, vector, sums):
    """`sum * x scale`."""
    return builder.fmul(_vector(builder, sums, vector, FLOATS), _x_scale(builder, a, row))


def _scaled_int32s(builder, a, row, vector, sums):
    """`(sum - offset) * (weight scale * x scale)`."""
    offsets = _vector(builder, a.offsets, vector, INT32S)
    whole = builder.sub(_vector(builder, sums, vector, INT32S), offsets)
    x_scale = _x_scale(builder, a, row)
    scales = builder.fmul(_vector(builder, a.weight_scales, vector, FLOATS), x_scale)
    return builder.fmul(builder.sitofp(whole, FLOATS), scales)


add_float_sums = _make_add(_floats)
add_group_sums = _make_add(_scaled_floats)
add_int8_sums = _make_add(_scaled_int32s)
