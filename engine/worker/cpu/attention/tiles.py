"""Register tiles of attention: scores of some rows against 16 keys, and the mix of values.

Keys of a page lie dimension by dimension, so that a vector holds one dimension of many tokens
and no sum runs across lanes; values lie token by token. Every number is added to in the order of
dimensions, or of tokens, whatever the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import FLOAT, INT32, word
from engine.worker.cpu.kernels.dot_tiles import LANES, VECTOR, fma, prefetch
from engine.worker.cpu.kernels.dtypes import FLOAT32, INT8, ITEM_BYTES, load

KEYS = 16  # of a score tile
SCORE_ROWS = 6  # times 16 keys: 12 sums, and AVX2 has 16 registers
MIX_ROWS = 3
MIX_WIDTH = 32  # floats of an output row that a mix tile holds


def _spread(builder, address):
    """The float at an address, in all lanes."""
    value = builder.load(builder.inttoptr(address, FLOAT.as_pointer()))
    lane = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(lane, ir.Constant(VECTOR, ir.Undefined), zeros)


def _lines(builder, base, stride, count):
    """Byte addresses of `count` lines, `stride` floats apart."""
    return [builder.add(base, builder.mul(stride, word(4 * i))) for i in range(count)]


def _scaled(builder, address, kind):
    """Bytes of so many items."""
    return builder.mul(address, word(ITEM_BYTES[kind]))


def make_score_tile(rows):
    """`y[m, :16] = scales * sum over d of q[m, d] * k[d, :16]` for `rows` rows of q.

    The tile is `(kind, k, k_stride, scales, q, q_stride, y, y_stride, dim, ahead)`: byte addresses,
    strides in items of k and in floats; only int8 has scales. `ahead` is a page like k's to
    prefetch.
    """
    parts = KEYS // LANES

    def build(context, builder, signature, args):
        kind = signature.args[0].literal_value
        _, k, k_stride, scales, q, q_stride, y, y_stride, dim, ahead = args
        q_lines = _lines(builder, q, q_stride, rows)
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(parts)] for _ in q_lines]
        for line in sums:
            for one in line:
                builder.store(ir.Constant(VECTOR, [0.0] * LANES), one)
        line_bytes = _scaled(builder, k_stride, kind)
        part_bytes = LANES * ITEM_BYTES[kind]
        with cgutils.for_range_slice(builder, word(0), dim, word(1)) as (d, _):
            shift = builder.mul(d, line_bytes)
            prefetch(builder, builder.add(ahead, shift))
            at = builder.add(k, shift)
            keys = [
                load(builder, kind, builder.add(at, word(part * part_bytes)), LANES)
                for part in range(parts)
            ]
            for line, line_sums in zip(q_lines, sums, strict=True):
                query = _spread(builder, builder.add(line, builder.mul(d, word(4))))
                for key, one in zip(keys, line_sums, strict=True):
                    builder.store(fma(builder, key, query, builder.load(one)), one)
        for line, line_sums in zip(_lines(builder, y, y_stride, rows), sums, strict=True):
            for part, one in enumerate(line_sums):
                total, shift = builder.load(one), word(4 * LANES * part)
                if kind == INT8:
                    scale = load(builder, FLOAT32, builder.add(scales, shift), LANES)
                    total = builder.fmul(total, scale)
                place = builder.inttoptr(builder.add(line, shift), VECTOR.as_pointer())
                builder.store(total, place, align=4)
        return context.get_dummy_value()

    def score_tile(typing, kind, k, k_stride, scales, q, q_stride, y, y_stride, dim, ahead):
        return types.void(kind, *[types.int64] * 9), build

    return intrinsic(prefer_literal=True)(score_tile)


def make_mix_tile(rows, width):
    """`out[m, :width] += sum over t of p[m, t] * v[t, :width]` for `rows` rows of out.

    The tile is `(kind, p, p_stride, v, v_stride, out, out_stride, length, ahead)`, as above.
    """
    parts = width // LANES

    def build(context, builder, signature, args):
        kind = signature.args[0].literal_value
        _, p, p_stride, v, v_stride, out, out_stride, length, ahead = args
        p_lines = _lines(builder, p, p_stride, rows)
        places = [
            builder.inttoptr(builder.add(line, word(4 * LANES * part)), VECTOR.as_pointer())
            for line in _lines(builder, out, out_stride, rows)
            for part in range(parts)
        ]
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]
        for place, one in zip(places, sums, strict=True):
            builder.store(builder.load(place, align=4), one)
        row_bytes = _scaled(builder, v_stride, kind)
        with cgutils.for_range_slice(builder, word(0), length, word(1)) as (t, _):
            shift = builder.mul(t, row_bytes)
            prefetch(builder, builder.add(ahead, shift))
            if width * ITEM_BYTES[kind] > 64:
                prefetch(builder, builder.add(ahead, builder.add(shift, word(64))))
            row = builder.add(v, shift)
            shares = [_spread(builder, builder.add(p, builder.mul(t, word(4)))) for p in p_lines]
            for part in range(parts):
                at = builder.add(row, word(LANES * ITEM_BYTES[kind] * part))
                value = load(builder, kind, at, LANES)
                for m, share in enumerate(shares):
                    one = sums[m * parts + part]
                    builder.store(fma(builder, value, share, builder.load(one)), one)
        for place, one in zip(places, sums, strict=True):
            builder.store(builder.load(one), place, align=4)
        return context.get_dummy_value()

    def mix_tile(typing, kind, p, p_stride, v, v_stride, out, out_stride, length, ahead):
        return types.void(kind, *[types.int64] * 8), build

    return intrinsic(prefer_literal=True)(mix_tile)


@intrinsic
def fma_one(typing, a, b, c):
    """`a * b + c` of single floats, rounded once as in the tiles."""

    def build(context, builder, signature, args):
        kind = ir.FunctionType(FLOAT, [FLOAT] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32")
        return builder.call(function, args)

    return types.float32(*[types.float32] * 3), build


@intrinsic
def largest_of(typing, address, count):
    """The largest of `count` floats at an address, for which LLVM finds no vectors by itself.

    What is no number is passed over.
    """

    def larger(builder, a, b):
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def build(context, builder, signature, args):
        address, count = args
        least = float("-inf")
        lanes = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [least] * LANES))
        end = builder.mul(builder.and_(count, word(-LANES)), word(4))
        with cgutils.for_range_slice(builder, word(0), end, word(4 * LANES)) as (at, _):
            found = load(builder, FLOAT32, builder.add(address, at), LANES)
            builder.store(larger(builder, found, builder.load(lanes)), lanes)
        top = cgutils.alloca_once_value(builder, ir.Constant(FLOAT, least))
        for lane in range(LANES):
            one = builder.extract_element(builder.load(lanes), ir.Constant(INT32, lane))
            builder.store(larger(builder, one, builder.load(top)), top)
        stop = builder.mul(count, word(4))
        with cgutils.for_range_slice(builder, end, stop, word(4)) as (at, _):
            one = load(builder, FLOAT32, builder.add(address, at), 0)
            builder.store(larger(builder, one, builder.load(top)), top)
        return builder.load(top)

    return types.float32(types.int64, types.int64), build
