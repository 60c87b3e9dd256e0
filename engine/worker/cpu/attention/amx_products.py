"""Products of floats with keys or values by AMX, which multiplies bfloat16.

A float is taken as the sum of two bfloat16 numbers: `high` rounds it, `low` rounds what is left. A
product of two floats is `high * high + low * high + high * low`. The numbers of a float16 cache are
cut into parts instead, whose sum is exact; those of a bfloat16 cache have no low part. So a product
has a relative error of about 2**-16, where a float16 cache has rounded the number by 2**-11.

What is summed comes in blocks of 32, each as 16 pairs of high parts, then 16 of low ones. A pair
shares 32 bits: items i and i + 16 of the block. A panel holds such pairs of 64 keys, or of 64
dimensions of values.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import INT64, int64
from engine.worker.cpu.kernels.dtypes import FLOAT32, load
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.linears.amx_tiles import (
    TILE_ROWS,
    VOID,
    WEIGHTS,
    X,
    configure,
    tile_instruction,
)
from engine.worker.cpu.kernels.linears.tile_formats import AMX_ROWS
from engine.worker.cpu.kernels.vectors import FLOATS, INT32S, LANES, pointer, prefetch

NUM_PARTS = (2, 2, 1, 0)  # parts in which a number is multiplied, by dtype
HIGH, LOW = 0, 1
FACTORS = ((HIGH, HIGH), (LOW, HIGH), (HIGH, LOW))  # parts of x and of a panel that are multiplied
BLOCK = 2 * LANES  # items of what is summed
X_BLOCK = BLOCK * BYTES  # bytes in a row of x, as many as those of its floats
QUARTERS = 4  # quarters of a panel, each as wide as a tile register
WIDTH = QUARTERS * LANES  # the width of a panel
LINE = WIDTH * BYTES  # bytes of a pair of each key or dimension
PART = LANES * LINE + 64  # bytes of the high or low parts of a block in a panel


@intrinsic(prefer_literal=True)
def split(typing, dtype, first, second, high, low, ahead):
    """Store the parts of 16 pairs of numbers; prefetch a line `ahead`. Byte addresses of the first
    and the second numbers of the pairs, and of their parts."""

    def build(context, builder, signature, args):
        dtype, (first, second, *targets, ahead) = signature.args[0].literal_value, args[1:]
        upper, bits, half = (ir.Constant(INT32S, [n] * LANES) for n in (-65536, 16, 0x8000))
        rest = [load(builder, dtype, address, LANES) for address in (first, second)]
        for target in targets[: NUM_PARTS[dtype]]:
            parts = [builder.bitcast(each, INT32S) for each in rest]
            if dtype == FLOAT32:
                parts = [builder.add(each, half) for each in parts]
            parts = [builder.and_(each, upper) for each in parts]
            rest = [
                builder.fsub(each, builder.bitcast(part, FLOATS))
                for each, part in zip(rest, parts, strict=True)
            ]
            pairs = builder.or_(builder.lshr(parts[0], bits), parts[1])
            builder.store(pairs, pointer(builder, target, INT32S), align=4)
        prefetch(builder, ahead)
        return context.get_dummy_value()

    return types.void(dtype, *[types.int64] * 5), build


@njit(inline="always")
def split_rows(x, x_stride, length, rows, target, target_stride):
    """The parts of rows of `length` floats, which may take the place of these."""
    for row in range(rows):
        line, to = x + row * x_stride, target + row * target_stride
        for at in range(0, length * BYTES, X_BLOCK):
            first, high = line + at, to + at
            second, low = first + X_BLOCK // 2, high + X_BLOCK // 2
            split(FLOAT32, first, second, high, low, second)


@njit(inline="always")
def multiply(dtype, x, x_stride, rows, panel, blocks, out, out_stride, config, adds):
    """`out[m, :64] = sum over blocks of x[m] * panel[:64]`, added to what is there if `adds`.

    Byte addresses and strides; `dtype` is that of the panel, `config` that of `configure`.
    """
    tiles = (rows + AMX_ROWS - 1) // AMX_ROWS
    most = (rows + tiles - 1) // tiles
    for first in range(0, rows, most):
        count = min(most, rows - first)
        at, to = x + first * x_stride, out + first * out_stride
        _multiply_tile(dtype, at, x_stride, count, panel, blocks, to, out_stride, config, adds)


@intrinsic(prefer_literal=True)
def _multiply_tile(typing, dtype, x, x_stride, rows, panel, blocks, out, out_stride, config, adds):
    """`multiply` for 1 to 32 rows."""

    def build(context, builder, signature, args):
        num_parts = NUM_PARTS[signature.args[0].literal_value]
        is_one = builder.icmp_signed("<=", args[3], int64(TILE_ROWS))
        with builder.if_else(is_one) as (one, two):
            for num_tiles, case in ((1, one), (2, two)):
                with case:
                    function = _function(builder.module, num_tiles)
                    if function.is_declaration:
                        _build(function, num_tiles, num_parts)
                    builder.call(function, args[1:])
        return context.get_dummy_value()

    return types.void(dtype, *[types.int64] * 9), build


def _function(module, num_tiles):
    """The product of one or two tiles of x; a declaration until its code is built."""
    name = f"attention_product_{num_tiles}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(VOID, [INT64] * 9), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function


def _build(function, num_tiles, num_parts):
    """One tile has the sums of the whole panel in registers, two have those of half of it: enough
    sums to hide the latency of each."""
    builder = ir.IRBuilder(function.append_basic_block())
    x, x_stride, rows, panel, blocks, out, out_stride, config, adds = function.args
    whole = int64(TILE_ROWS)
    top, bottom = (rows, rows) if num_tiles == 1 else (whole, builder.sub(rows, whole))
    configure(builder, config, top, bottom)
    columns = QUARTERS // num_tiles
    x_step, out_step = (builder.mul(stride, whole) for stride in (x_stride, out_stride))
    for first in range(0, QUARTERS, columns):
        line = builder.add(out, int64(first * LANES * BYTES))
        outputs = [line, builder.add(line, out_step)][:num_tiles]
        with builder.if_else(builder.icmp_signed("!=", adds, int64(0))) as (again, new):
            with again:
                _move_sums(builder, "tileloadd64", outputs, out_stride, columns)
            with new:
                for register in range(QUARTERS):
                    tile_instruction(builder, "tilezero", register)
        with cgutils.for_range_slice(builder, int64(0), blocks, int64(1)) as (block, _):
            line = builder.add(x, builder.mul(block, int64(X_BLOCK)))
            lines = [line, builder.add(line, x_step)][:num_tiles]
            at = builder.add(panel, builder.mul(block, int64(num_parts * PART)))
            at = builder.add(at, int64(first * LANES * BYTES))
            _add_block(builder, lines, x_stride, at, columns, num_parts)
        _move_sums(builder, "tilestored64", outputs, out_stride, columns)
    builder.ret_void()


def _move_sums(builder, instruction, outputs, stride, columns):
    """Load or store the sums of each tile of x."""
    for tile, output in enumerate(outputs):
        for column in range(columns):
            at = builder.add(output, int64(column * LANES * BYTES))
            tile_instruction(builder, instruction, tile * columns + column, at, stride)


def _add_block(builder, lines, x_stride, panel, columns, num_parts):
    """Add the products of a block, of some columns of the panel, to the sums."""
    for x_part, part in FACTORS[: 1 + num_parts]:
        for register, line in zip(X, lines, strict=False):
            at = builder.add(line, int64(x_part * X_BLOCK // 2))
            tile_instruction(builder, "tileloadd64", register, at, x_stride)
        for column in range(columns):
            factor = WEIGHTS[column % len(WEIGHTS)]
            at = builder.add(panel, int64(part * PART + column * LANES * BYTES))
            tile_instruction(builder, "tileloadd64", factor, at, int64(LINE))
            for tile in range(len(lines)):
                sums = tile * columns + column
                tile_instruction(builder, "tdpbf16ps", sums, X[tile], factor)
