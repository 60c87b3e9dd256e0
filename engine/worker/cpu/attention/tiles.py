"""Register tiles of attention: scores of some rows against 16 keys, and sums of weighted values.

Keys of a page are stored dimension by dimension, so that a vector holds one dimension of many
tokens and no sum runs across lanes; values are stored token by token. Each sum adds in the order of
dimensions, or of tokens, whatever rows are beside it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import FLOAT, INT64, int64
from engine.worker.cpu.kernels.dtypes import FLOAT32, INT8, ITEM_BYTES, load
from engine.worker.cpu.kernels.vectors import FLOATS, LANES, broadcast, fma, pointer, prefetch

KEYS = 16  # keys in a score tile
# Two tiles at once have sums enough to hide the latency of additions even with one row, and read a
# query once for 32 keys.
HAS_TWO_TILES = LANES == 16
VALUE_WIDTH = 32  # floats of an output row that a value tile computes
# Rows of a tile, at most: AVX-512 has 32 registers, of which sums need 12 or more to hide the
# latency of their additions; AVX2 has 16.
SCORE_ROWS, VALUE_ROWS = (12, 8) if LANES == 16 else (6, 3)


def _broadcast_at(builder, address):
    """The float at an address, in all lanes."""
    return broadcast(builder, builder.load(pointer(builder, address, FLOAT)))


def _lines(builder, base, stride, count):
    """Byte addresses of `count` lines, `stride` floats apart."""
    return [builder.add(base, builder.mul(stride, int64(4 * i))) for i in range(count)]


def _make_tile(name, max_rows, num_args, build_rows):
    """An intrinsic called as `(dtype, rows, ...)` with `num_args` int64 behind them.

    `build_rows(builder, dtype, rows, args)` builds the code for one number of rows.
    """

    def build(context, builder, signature, args):
        dtype = signature.args[0].literal_value
        for rows in range(1, max_rows + 1):
            with builder.if_then(builder.icmp_signed("==", args[1], int64(rows))):
                code = _function(builder.module, f"{name}_{dtype}_{rows}", num_args)
                if code.is_declaration:
                    inner = ir.IRBuilder(code.append_basic_block())
                    build_rows(inner, dtype, rows, code.args)
                    inner.ret_void()
                builder.call(code, args[2:])
        return context.get_dummy_value()

    def typed(dtype):
        return types.void(dtype, *[types.int64] * (1 + num_args)), build

    return typed


def _function(module, name, num_args):
    """The function of a tile; a declaration until its code is built."""
    if name in module.globals:
        return module.globals[name]
    kind = ir.FunctionType(ir.VoidType(), [INT64] * num_args)
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # it needs all registers
    return function


def _make_score_tile(tiles):
    """The code of a tile of `tiles` times 16 keys, each 16 at an address of their own."""
    parts = KEYS // LANES

    def build_rows(builder, dtype, rows, args):
        k_stride, q, q_stride, y, y_stride, dim = args[:6]
        keys, scales, aheads = (args[6 + i * tiles : 6 + (i + 1) * tiles] for i in range(3))
        q_lines, zeros = _lines(builder, q, q_stride, rows), ir.Constant(FLOATS, [0.0] * LANES)
        lanes = [(tile, LANES * part) for tile in range(tiles) for part in range(parts)]
        sums = [[cgutils.alloca_once_value(builder, zeros) for _ in lanes] for _ in q_lines]
        line_bytes = builder.mul(k_stride, int64(ITEM_BYTES[dtype]))
        with cgutils.for_range_slice(builder, int64(0), dim, int64(1)) as (d, _):
            shift = builder.mul(d, line_bytes)
            for ahead in aheads:
                prefetch(builder, builder.add(ahead, shift))
            starts = [builder.add(address, shift) for address in keys]
            vectors = [
                load(
                    builder,
                    dtype,
                    builder.add(starts[tile], int64(first * ITEM_BYTES[dtype])),
                    LANES,
                )
                for tile, first in lanes
            ]
            for line, line_sums in zip(q_lines, sums, strict=True):
                query = _broadcast_at(builder, builder.add(line, builder.mul(d, int64(4))))
                for key, one in zip(vectors, line_sums, strict=True):
                    builder.store(fma(builder, key, query, builder.load(one)), one)
        for line, line_sums in zip(_lines(builder, y, y_stride, rows), sums, strict=True):
            for (tile, first), one in zip(lanes, line_sums, strict=True):
                total = builder.load(one)
                if dtype == INT8:
                    at = builder.add(scales[tile], int64(4 * first))
                    total = builder.fmul(total, load(builder, FLOAT32, at, LANES))
                at = builder.add(line, int64(4 * (KEYS * tile + first)))
                builder.store(total, pointer(builder, at, FLOATS), align=4)

    return _make_tile(f"scores_{tiles}", SCORE_ROWS, 6 + 3 * tiles, build_rows)


_typed_scores, _typed_scores_of_two = _make_score_tile(1), _make_score_tile(2)


@intrinsic(prefer_literal=True)
def score_tile(typing, dtype, rows, k_stride, q, q_stride, y, y_stride, dim, k, scales, ahead):
    """`y[m, :16] = scales * sum over d of q[m, d] * k[d, :16]` for up to `SCORE_ROWS` rows of q.

    Byte addresses, strides in items of k and in floats; only int8 has scales. `ahead` is a page
    like k's to prefetch.
    """
    return _typed_scores(dtype)


@intrinsic(prefer_literal=True)
def score_two_tiles(
    typing, dtype, rows, k_stride, q, q_stride, y, y_stride, dim,
    k, next_k, scales, next_scales, ahead, next_ahead,
):  # fmt: skip
    """`score_tile` for 32 keys, of which the next 16 have addresses of their own. Each sum is that
    of `score_tile`."""
    return _typed_scores_of_two(dtype)


def make_value_tile(max_rows, width):
    """`out[m, :width] += sum over t of p[m, t] * v[t, :width]` for up to `max_rows` rows of out.

    Called as `(dtype, rows, p, p_stride, v, v_stride, out, out_stride, length, ahead)`, as above.
    """
    parts = width // LANES

    def build_rows(builder, dtype, rows, args):
        p, p_stride, v, v_stride, out, out_stride, length, ahead = args
        p_lines = _lines(builder, p, p_stride, rows)
        targets = [
            pointer(builder, builder.add(line, int64(4 * LANES * part)), FLOATS)
            for line in _lines(builder, out, out_stride, rows)
            for part in range(parts)
        ]
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in targets]
        for target, one in zip(targets, sums, strict=True):
            builder.store(builder.load(target, align=4), one)
        row_bytes = builder.mul(v_stride, int64(ITEM_BYTES[dtype]))
        part_bytes = LANES * ITEM_BYTES[dtype]
        with cgutils.for_range_slice(builder, int64(0), length, int64(1)) as (t, _):
            shift = builder.mul(t, row_bytes)
            prefetch(builder, builder.add(ahead, shift))
            if width * ITEM_BYTES[dtype] > 64:
                prefetch(builder, builder.add(ahead, builder.add(shift, int64(64))))
            row = builder.add(v, shift)
            values = [
                load(builder, dtype, builder.add(row, int64(part * part_bytes)), LANES)
                for part in range(parts)
            ]
            for m, line in enumerate(p_lines):
                weight = _broadcast_at(builder, builder.add(line, builder.mul(t, int64(4))))
                for part, value in enumerate(values):
                    one = sums[m * parts + part]
                    builder.store(fma(builder, value, weight, builder.load(one)), one)
        for target, one in zip(targets, sums, strict=True):
            builder.store(builder.load(one), target, align=4)

    typed = _make_tile(f"values_{width}", max_rows, 8, build_rows)

    def value_tile(typing, dtype, rows, p, p_stride, v, v_stride, out, out_stride, length, ahead):
        return typed(dtype)

    return intrinsic(prefer_literal=True)(value_tile)
