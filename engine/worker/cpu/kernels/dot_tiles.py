"""Register tiles: the inner loops that the compiler does not find by itself.

A tile keeps its sums in vector registers while it walks memory once, and adds in an order that
depends on the length of the walk alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from itertools import chain
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.features import has
from engine.worker.cpu.intrinsics import FLOAT, INT32, word

LANES = 16 if has("avx512f") else 8
STEP = 16  # floats of k per turn of the dot loop
MOST_ROWS = 3  # times 4 columns: 12 sums, and AVX2 has 16 registers
COLUMNS = 4

_KNOWN = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
INSTRUCTIONS = next((_KNOWN[name] for name in _KNOWN if has(name)), "no vectors")

VECTOR = ir.VectorType(FLOAT, LANES)
BYTE_POINTER = ir.IntType(8).as_pointer()


def fma(builder, a, b, c):
    """`a * b + c` of vectors, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [a, b, c])


def _fold(builder, a, b, parts):
    """Add the upper to the lower half of each of the `parts` runs in a and b; all side by side."""
    lanes = a.type.count
    run = lanes // parts
    lower = [
        source * lanes + part * run + lane
        for source in (0, 1)
        for part in range(parts)
        for lane in range(run // 2)
    ]
    low, high = (
        ir.Constant(ir.VectorType(INT32, lanes), [at + shift for at in lower])
        for shift in (0, run // 2)
    )
    return builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))


def _four_sums(builder, a, b, c, d):
    """The sum of the lanes of each of four vectors, as a vector of four."""
    folded = _fold(builder, _fold(builder, a, b, 1), _fold(builder, c, d, 1), 2)
    for width in (8, 4):
        if folded.type.count > width:
            folded = _fold_once(builder, folded, width)
    return folded


def _fold_once(builder, vector, width):
    """Halve four runs side by side to `width` lanes in all."""
    run = vector.type.count // 4
    lower = [part * run + lane for part in range(4) for lane in range(run // 2)]
    low, high = (
        ir.Constant(ir.VectorType(INT32, width), [at + shift for at in lower])
        for shift in (0, run // 2)
    )
    undefined = ir.Constant(vector.type, ir.Undefined)
    return builder.fadd(
        builder.shuffle_vector(vector, undefined, low),
        builder.shuffle_vector(vector, undefined, high),
    )


def prefetch(builder, address):
    """Ask for the cache line at an address; never faults."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE_POINTER, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(INT32, value) for value in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, BYTE_POINTER), read, keep, data])


def _vector_at(builder, address):
    return builder.inttoptr(address, VECTOR.as_pointer())


def _float_at(builder, address):
    return builder.inttoptr(address, FLOAT.as_pointer())


def _load_vector(builder, address):
    return builder.load(_vector_at(builder, address), align=4)


def _lines(builder, base, stride, count):
    """Byte addresses of `count` lines, `stride` floats apart."""
    return [builder.add(base, builder.mul(stride, word(4 * i))) for i in range(count)]


def make_dot_tile(rows, columns):
    """`y[m, n] = start + sum over k of x[m, k] * w[n, k]`, for `rows` x (1 or 4) columns of y.

    The tile is `(w, w_stride, x, x_stride, y, y_stride, length, ahead, also, adds)`: byte
    addresses, strides in floats; `start` is what y holds if `adds`, else 0. On its way it
    prefetches a line at `ahead` and one at `also`.
    """

    def build(context, builder, signature, args):
        w, w_stride, x, x_stride, y, y_stride, length, ahead, also, adds = args
        lines = DotLines(
            w=_lines(builder, w, w_stride, columns),
            x=_lines(builder, x, x_stride, rows),
            y=_lines(builder, y, y_stride, rows),
            ahead=[ahead, also],
        )
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in lines.w] for _ in lines.x]
        for one in chain.from_iterable(sums):
            builder.store(ir.Constant(VECTOR, [0.0] * LANES), one)
        end = builder.mul(builder.and_(length, word(-STEP)), word(4))
        with cgutils.for_range_slice(builder, word(0), end, word(4 * STEP)) as (k, _):
            _dot_step(builder, lines, sums, k)
        _dot_store(builder, lines, sums, builder.icmp_signed("!=", adds, word(0)))
        stop = builder.mul(length, word(4))
        with cgutils.for_range_slice(builder, end, stop, word(4)) as (k, _):
            _dot_rest(builder, lines, k)
        return context.get_dummy_value()

    def dot_tile(typing, w, w_stride, x, x_stride, y, y_stride, length, ahead, also, adds):
        return types.void(*[types.int64] * 10), build

    return intrinsic(dot_tile)


class DotLines(NamedTuple):
    """Byte addresses of the lines that a dot tile walks."""

    w: list[ir.Value]
    x: list[ir.Value]
    y: list[ir.Value]
    ahead: list[ir.Value]


def _dot_step(builder, lines, sums, k):
    """`STEP` floats of k: every x times every w."""
    for line in lines.ahead:
        prefetch(builder, builder.add(line, k))
    for part in range(STEP // LANES):
        at = builder.add(k, word(part * LANES * 4))
        xs = [_load_vector(builder, builder.add(line, at)) for line in lines.x]
        for n, line in enumerate(lines.w):
            weight = _load_vector(builder, builder.add(line, at))
            for x, line_sums in zip(xs, sums, strict=True):
                added = fma(builder, weight, x, builder.load(line_sums[n]))
                builder.store(added, line_sums[n])


def _dot_store(builder, lines, sums, is_adding):
    """The sums of the lanes into y, four columns at a time or one."""
    zeros, four = ir.Constant(VECTOR, [0.0] * LANES), ir.VectorType(FLOAT, 4)
    columns = len(lines.w)
    for y_line, line_sums in zip(lines.y, sums, strict=True):
        loaded = [builder.load(one) for one in line_sums]
        totals = _four_sums(builder, *loaded, *[zeros] * (4 - columns))
        out, none = _float_at(builder, y_line), ir.Constant(FLOAT, 0.0)
        if columns == 4:
            out, none = builder.bitcast(out, four.as_pointer()), ir.Constant(four, [0.0] * 4)
        else:
            totals = builder.extract_element(totals, ir.Constant(INT32, 0))
        start = builder.select(is_adding, builder.load(out, align=4), none)
        builder.store(builder.fadd(totals, start), out, align=4)


def _dot_rest(builder, lines, k):
    """One float of k beyond the last whole step."""
    for x_line, y_line in zip(lines.x, lines.y, strict=True):
        value = builder.load(_float_at(builder, builder.add(x_line, k)))
        for n, w_line in enumerate(lines.w):
            weight = builder.load(_float_at(builder, builder.add(w_line, k)))
            out = _float_at(builder, builder.add(y_line, word(4 * n)))
            builder.store(builder.fadd(builder.load(out), builder.fmul(value, weight)), out)
