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

KEYS = 16  # of a score tile
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


def _build_scores(builder, dtype, rows, args):
    parts = KEYS // LANES
    k, k_stride, scales, q, q_stride, y, y_stride, dim, ahead = args
    q_lines = _lines(builder, q, q_stride, rows)
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(parts)] for _ in q_lines]
    for line in sums:
        for one in line:
            builder.store(ir.Constant(FLOATS, [0.0] * LANES), one)
    line_bytes = builder.mul(k_stride, int64(ITEM_BYTES[dtype]))
    part_bytes = LANES * ITEM_BYTES[dtype]
    with cgutils.for_range_slice(builder, int64(0), dim, int64(1)) as (d, _):
        shift = builder.mul(d, line_bytes)
        prefetch(builder, builder.add(ahead, shift))
        at = builder.add(k, shift)
        keys = [
            load(builder, dtype, builder.add(at, int64(part * part_bytes)), LANES)
            for part in range(parts)
        ]
        for line, line_sums in zip(q_lines, sums, strict=True):
            query = _broadcast_at(builder, builder.add(line, builder.mul(d, int64(4))))
            for key, one in zip(keys, line_sums, strict=True):
                builder.store(fma(builder, key, query, builder.load(one)), one)
    for line, line_sums in zip(_lines(builder, y, y_stride, rows), sums, strict=True):
        for part, one in enumerate(line_sums):
            total, shift = builder.load(one), int64(4 * LANES * part)
            if dtype == INT8:
                scale = load(builder, FLOAT32, builder.add(scales, shift), LANES)
                total = builder.fmul(total, scale)
            target = pointer(builder, builder.add(line, shift), FLOATS)
            builder.store(total, target, align=4)


_typed_scores = _make_tile("scores", SCORE_ROWS, 9, _build_scores)


@intrinsic(prefer_literal=True)
def score_tile(typing, dtype, rows, k, k_stride, scales, q, q_stride, y, y_stride, dim, ahead):
    """`y[m, :16] = scales * sum over d of q[m, d] * k[d, :16]` for up to `SCORE_ROWS` rows of q.

    Byte addresses, strides in items of k and in floats; only int8 has scales. `ahead` is a page
    like k's to prefetch.
    """
    return _typed_scores(dtype)


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
