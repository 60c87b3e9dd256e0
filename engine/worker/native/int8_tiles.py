"""The register tile of the 8-bit linear: weights of 8 bits times activations of 16.

Sums are exact in 32 bits, so their order is free and a row's result cannot depend on others.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from itertools import chain
from typing import NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.native.memory import FLOAT, INT32, word
from engine.worker.native.tiles import COLUMNS, LANES, prefetch

TURN = 32  # of k
PAIRS = 2 * LANES  # of k that one vector of sums takes in
SUMS = ir.VectorType(INT32, LANES)
NARROW = ir.VectorType(ir.IntType(8), PAIRS)
WIDE = ir.VectorType(ir.IntType(16), PAIRS)
FOUR_FLOATS = ir.VectorType(FLOAT, COLUMNS)


def _pair_products():
    """LLVM's name of the instruction that multiplies 16-bit pairs and adds neighbours, if any."""
    features = llvmlite.binding.get_host_cpu_features()
    if LANES == 16 and features.get("avx512bw", False):
        return "llvm.x86.avx512.pmaddw.d.512"
    return "llvm.x86.avx2.pmadd.wd" if LANES == 8 and features.get("avx2", False) else None


PAIR_PRODUCTS = _pair_products()


class TileOperands(NamedTuple):
    """Byte addresses and, for strides, elements; `length` of k is a multiple of `TURN`."""

    w: ir.Value  # int8
    w_stride: ir.Value
    w_scale: ir.Value  # float32
    x: ir.Value  # int16
    x_stride: ir.Value
    x_scale: ir.Value  # float32
    y: ir.Value  # float32
    y_stride: ir.Value
    length: ir.Value
    ahead: ir.Value  # four lines of w that are prefetched
    adds: ir.Value


def make_int8_tile(rows):
    """`y[m, n] = start + (sum over k of x[m, k] * w[n, k]) * x_scale[m] * w_scale[n]`.

    For `rows` rows m and four columns n; `start` is what y holds if `adds`, else 0. Called with
    what `TileOperands` names.
    """

    def build(context, builder, signature, args):
        tile = TileOperands(*args)
        w_lines = _lines(builder, tile.w, tile.w_stride, COLUMNS, 1)
        x_lines = _lines(builder, tile.x, tile.x_stride, rows, 2)
        far_lines = _lines(builder, tile.ahead, tile.w_stride, COLUMNS, 1)
        sums = [[cgutils.alloca_once(builder, SUMS) for _ in w_lines] for _ in x_lines]
        for one in chain.from_iterable(sums):
            builder.store(ir.Constant(SUMS, [0] * LANES), one)
        with cgutils.for_range_slice(builder, word(0), tile.length, word(TURN)) as (k, _):
            for line in far_lines:
                prefetch(builder, builder.add(line, k))
            for part in range(0, TURN, PAIRS):
                _add_products(builder, w_lines, x_lines, sums, builder.add(k, word(part)))
        _store(builder, tile, [[builder.load(one) for one in line] for line in sums])
        return context.get_dummy_value()

    def int8_tile(
        typing, w, w_stride, w_scale, x, x_stride, x_scale, y, y_stride, length, ahead, adds
    ):
        return types.void(*[types.int64] * len(TileOperands._fields)), build

    return intrinsic(int8_tile)


def _lines(builder, base, stride, count, item_bytes):
    """Byte addresses of `count` lines, `stride` items apart."""
    return [builder.add(base, builder.mul(stride, word(item_bytes * i))) for i in range(count)]


def _load(builder, address, kind, align):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _add_products(builder, w_lines, x_lines, sums, k):
    """`PAIRS` of k: every x times every w."""
    at = builder.mul(k, word(2))
    xs = [_load(builder, builder.add(line, at), WIDE, 2) for line in x_lines]
    for n, line in enumerate(w_lines):
        weights = builder.sext(_load(builder, builder.add(line, k), NARROW, 1), WIDE)
        for x, line_sums in zip(xs, sums, strict=True):
            added = builder.add(_products(builder, weights, x), builder.load(line_sums[n]))
            builder.store(added, line_sums[n])


def _products(builder, a, b):
    """The sum of each pair of neighbours' products."""
    if PAIR_PRODUCTS is None:
        return _plain_products(builder, a, b)
    kind = ir.FunctionType(SUMS, [WIDE] * 2)
    function = cgutils.get_or_insert_function(builder.module, kind, PAIR_PRODUCTS)
    return builder.call(function, [a, b])


def _plain_products(builder, a, b):
    """The same where the machine has no such instruction."""
    undefined = ir.Constant(WIDE, ir.Undefined)
    products = []
    for first in (0, 1):
        places = ir.Constant(SUMS, list(range(first, PAIRS, 2)))
        halves = [
            builder.sext(builder.shuffle_vector(each, undefined, places), SUMS) for each in (a, b)
        ]
        products.append(builder.mul(*halves))
    return builder.add(*products)


def _store(builder, tile, sums):
    """The scaled sums into y, a row of four columns at a time."""
    w_scale = _load(builder, tile.w_scale, FOUR_FLOATS, 4)
    nothing = ir.Constant(FOUR_FLOATS, [0.0] * COLUMNS)
    spread = ir.Constant(ir.VectorType(INT32, COLUMNS), [0] * COLUMNS)
    is_adding = builder.icmp_signed("!=", tile.adds, word(0))
    y_lines = _lines(builder, tile.y, tile.y_stride, len(sums), 4)
    for m, (y_line, line_sums) in enumerate(zip(y_lines, sums, strict=True)):
        scale = _load(builder, builder.add(tile.x_scale, word(4 * m)), FLOAT, 4)
        scales = builder.shuffle_vector(
            builder.insert_element(nothing, scale, ir.Constant(INT32, 0)), nothing, spread
        )
        totals = builder.sitofp(_totals(builder, line_sums), FOUR_FLOATS)
        value = builder.fmul(totals, builder.fmul(w_scale, scales))
        out = builder.inttoptr(y_line, FOUR_FLOATS.as_pointer())
        start = builder.select(is_adding, builder.load(out, align=4), nothing)
        builder.store(builder.fadd(value, start), out, align=4)


def _totals(builder, four):
    """The sum of the lanes of each of four vectors, side by side."""
    width = LANES
    while width > 1:
        width //= 2
        four = [_halved(builder, vector, width) for vector in four]
    result = ir.Constant(ir.VectorType(INT32, COLUMNS), ir.Undefined)
    for n, vector in enumerate(four):
        total = builder.extract_element(vector, ir.Constant(INT32, 0))
        result = builder.insert_element(result, total, ir.Constant(INT32, n))
    return result


def _halved(builder, vector, width):
    """Its upper half added to its lower, `width` lanes each."""
    undefined = ir.Constant(vector.type, ir.Undefined)
    low, high = (
        builder.shuffle_vector(
            vector,
            undefined,
            ir.Constant(ir.VectorType(INT32, width), list(range(first, first + width))),
        )
        for first in (0, width)
    )
    return builder.add(low, high)
