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
from engine.worker.cpu.kernels.dtypes import (
    ADD_PAIRS,
    BFLOAT16_PAIRS,
    FLOAT32,
    IN_PAIRS,
    ITEM_BYTES,
    JOINED_PAIRS,
    WITH_SCALES,
    load,
)
from engine.worker.cpu.kernels.vectors import (
    FLOATS,
    INT32S,
    LANES,
    broadcast,
    call,
    fma,
    pointer,
    prefetch,
)

KEYS = 16  # keys in a score tile
# Two tiles at once have sums enough to hide the latency of additions even with one row, and read a
# query once for 32 keys.
HAS_TWO_TILES = LANES == 16
RUN_ITEMS = 3  # a run of values: its address, the bytes between tokens, their number
RUN_BYTES = 8 * RUN_ITEMS
# Runs of values that are multiplied before the next dimensions. Milliseconds of a layer for 512
# tokens after 3,584, 32 heads over 8 of 128, on two cores of Zen 5 (blocks of 16, 24 rows a task):
#     runs               1    2    4    8
#     AVX-512 BF16     108  102  109  109
#     AVX2, float16    337  356
RUNS = 2 if LANES == 16 else 1
# Times as far ahead keys and values are prefetched, by dtype: int8 has half of the bytes. CPU
# milliseconds of a layer for 8 decodes over 8,192 tokens in int8, on two cores of Zen 5:
#     times                1     2
#     12 over 12 of 64   8.6   7.3
#     32 over 8 of 128   9.0   8.3
AHEAD = (1, 1, 1, 2, 1, 2)
VALUE_WIDTH = 32  # floats of an output row that a value tile computes
# Rows of a tile, at most: AVX-512 has 32 registers, of which sums need 12 or more to hide the
# latency of their additions; AVX2 has 16.
SCORE_ROWS, VALUE_ROWS = (12, 8) if LANES == 16 else (6, 3)


def _broadcast_at(builder, address):
    """The float at an address, in all lanes."""
    return broadcast(builder, builder.load(pointer(builder, address, FLOAT)))


def _step(dtype):
    """Numbers of a sum that are multiplied at a time: 32 bits of a query or of weights."""
    return 2 if dtype in IN_PAIRS else 1


def _load(builder, dtype, address, line_bytes, count):
    """`count` vectors of `LANES` numbers at an address; in pairs, each number with the one
    `line_bytes` behind it, or beside it if they are joined."""
    if dtype == JOINED_PAIRS:
        places = [builder.add(address, int64(4 * LANES * i)) for i in range(count)]
        return [builder.load(pointer(builder, each, INT32S), align=4) for each in places]
    lines = [address, builder.add(address, line_bytes)][: _step(dtype)]
    if dtype == BFLOAT16_PAIRS:
        return _interleave(builder, lines, count)
    size = LANES * ITEM_BYTES[dtype]
    found = [
        [load(builder, dtype, builder.add(line, int64(size * i)), LANES) for line in lines]
        for i in range(count)
    ]
    return [_pairs(builder, *each) if dtype in IN_PAIRS else each[0] for each in found]


def _interleave(builder, lines, count):
    """`count` vectors of pairs, of the bfloat16 numbers at two addresses."""
    kind = ir.VectorType(ir.IntType(16), LANES * count)
    lines = [builder.load(pointer(builder, line, kind), align=2) for line in lines]
    found = []
    for first in range(0, LANES * count, LANES):
        order = [lane + line for lane in range(first, first + LANES) for line in (0, LANES * count)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order)
        found.append(builder.bitcast(builder.shuffle_vector(*lines, mask), INT32S))
    return found


def _pairs(builder, first, second):
    """Pairs of bfloat16, of floats that are exact in it. On Zen 5 this is faster than a shuffle of
    the floats' halves, or of bytes before they are converted."""
    first, second = (builder.bitcast(floats, INT32S) for floats in (first, second))
    return builder.or_(builder.lshr(first, ir.Constant(INT32S, [16] * LANES)), second)


def _add_products(builder, dtype, numbers, factor, sums):
    if dtype not in IN_PAIRS:
        return fma(builder, numbers, factor, sums)
    return call(builder, ADD_PAIRS, FLOATS, sums, numbers, builder.bitcast(factor, INT32S))


def _lines(builder, base, stride, count):
    """Byte addresses of `count` lines, `stride` floats apart."""
    return [builder.add(base, builder.mul(stride, int64(4 * i))) for i in range(count)]


def _lines_of(builder, base, shift, line_bytes, count):
    """The addresses of `count` lines of `line_bytes`, `shift` behind the base."""
    first = builder.add(base, shift)
    return [first, builder.add(first, line_bytes)][:count]


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
        step = _step(dtype)
        with cgutils.for_range_slice(builder, int64(0), dim, int64(step)) as (d, _):
            shift = builder.mul(d, line_bytes)
            for ahead in aheads if dtype != JOINED_PAIRS else ():  # a copy of keys in cache
                for line in _lines_of(builder, ahead, shift, line_bytes, step):
                    prefetch(builder, line)
            vectors = [
                vector
                for address in keys
                for vector in _load(builder, dtype, builder.add(address, shift), line_bytes, parts)
            ]
            at = builder.mul(d, int64(4 // step))
            for line, line_sums in zip(q_lines, sums, strict=True):
                query = _broadcast_at(builder, builder.add(line, at))
                for key, one in zip(vectors, line_sums, strict=True):
                    total = _add_products(builder, dtype, key, query, builder.load(one))
                    builder.store(total, one)
        for line, line_sums in zip(_lines(builder, y, y_stride, rows), sums, strict=True):
            for (tile, first), one in zip(lanes, line_sums, strict=True):
                total = builder.load(one)
                if dtype in WITH_SCALES:
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

    Called as `(dtype, rows, p, p_stride, runs, num_runs, column, out, out_stride)`, as above. The
    tokens are those of some runs, int64 `[num_runs + RUNS * AHEAD[dtype], RUN_ITEMS]`; the values
    of a run begin `column` bytes behind its address. The run that is so many further is prefetched.
    """
    parts = width // LANES

    def build_rows(builder, dtype, rows, args):
        p, p_stride, runs, num_runs, column, out, out_stride = args
        p_lines = _lines(builder, p, p_stride, rows)
        targets = [
            pointer(builder, builder.add(line, int64(4 * LANES * part)), FLOATS)
            for line in _lines(builder, out, out_stride, rows)
            for part in range(parts)
        ]
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in targets]
        for target, one in zip(targets, sums, strict=True):
            builder.store(builder.load(target, align=4), one)
        place = cgutils.alloca_once_value(builder, int64(0))  # bytes before a weight in its row
        step = _step(dtype)
        with cgutils.for_range_slice(builder, int64(0), num_runs, int64(1)) as (number, _):
            run = builder.add(runs, builder.mul(number, int64(RUN_BYTES)))
            address, row_bytes, length, then = (
                builder.load(pointer(builder, builder.add(run, int64(8 * item)), INT64))
                for item in (0, 1, 2, RUNS * AHEAD[dtype] * RUN_ITEMS)
            )
            first, ahead = builder.add(address, column), builder.add(then, column)
            with cgutils.for_range_slice(builder, int64(0), length, int64(step)) as (t, _):
                shift = builder.mul(t, row_bytes)
                for line in _lines_of(builder, ahead, shift, row_bytes, step):
                    for start in range(0, width * ITEM_BYTES[dtype], 64):
                        prefetch(builder, builder.add(line, int64(start)))
                row = builder.add(first, shift)
                values = _load(builder, dtype, row, row_bytes, parts)
                at = builder.load(place)
                for m, line in enumerate(p_lines):
                    weight = _broadcast_at(builder, builder.add(line, at))
                    for part, value in enumerate(values):
                        one = sums[m * parts + part]
                        total = _add_products(builder, dtype, value, weight, builder.load(one))
                        builder.store(total, one)
                builder.store(builder.add(at, int64(4)), place)
        for target, one in zip(targets, sums, strict=True):
            builder.store(builder.load(one), target, align=4)

    typed = _make_tile(f"values_{width}", max_rows, 7, build_rows)

    def value_tile(typing, dtype, rows, p, p_stride, runs, num_runs, column, out, out_stride):
        return typed(dtype)

    return intrinsic(prefer_literal=True)(value_tile)
