"""The register tile of a linear layer by AMX, over the panels of `packed_tiles`.

AMX multiplies 16 rows of x by 16 output channels and 16 groups of k in one instruction (Intel 64
and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and TDPBUSD). A tile of
weights is half the width of a panel: a group of k in each row, a channel in each lane.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import INT64, int64
from engine.worker.cpu.kernels.linears.packed_tiles import (
    INT8,
    SUMS_BYTES,
    VECTORS,
    WIDTH,
    TileOperands,
)
from engine.worker.cpu.kernels.linears.tile_formats import AMX_GROUPS, HAS_AMX
from engine.worker.cpu.kernels.vectors import BYTE_POINTER, LANES, LINE, call, prefetch

TILE_ROWS = 16  # at most, of a tile register, with 64 bytes each
GROUP_BYTES = 4 * WIDTH  # a group of weights in a panel
# Tile registers: sums of each tile of x and half of a panel, tiles of x, halves of the weights.
SUMS, X, WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
# LDTILECFG reads a palette, the bytes of a row of each tile (int16), the rows of each (int8).
PALETTE = 1
ROW_BYTES_AT, ROWS_AT = 16, 48
TOP, BOTTOM = (0, 1, 4), (2, 3, 5)  # tile registers with the first 16 rows of x, with the others
VOID = ir.VoidType()


def tile_instruction(builder, name, *args):
    """`llvm.x86.<name>` on tile registers; loads and stores also take an address and a stride."""
    values = [ir.Constant(INT8, each) if isinstance(each, int) else each for each in args]
    if name.startswith(("tileload", "tilestore")):
        values[1] = builder.inttoptr(values[1], BYTE_POINTER)
    call(builder, f"llvm.x86.{name}", VOID, *values)


def configure(builder, config, top, bottom):
    """Give tiles of x and sums as many rows as x has, int64; `config` is what was loaded last, an
    address of `CONFIG_BYTES`. The same configuration is not loaded again, as that takes 50 ns."""
    at = builder.inttoptr(config, BYTE_POINTER)

    def place(offset, kind):
        return builder.bitcast(builder.gep(at, [int64(offset)]), kind.as_pointer())

    rows = int64(sum(TILE_ROWS << 8 * number for number in WEIGHTS))
    for count, registers in ((top, TOP), (bottom, BOTTOM)):
        ones = sum(1 << 8 * number for number in registers)
        rows = builder.add(rows, builder.mul(count, int64(ones)))
    found = builder.load(place(ROWS_AT, INT64), align=8)
    with builder.if_then(builder.icmp_signed("!=", found, rows)):
        builder.store(ir.Constant(INT64, PALETTE), place(0, INT64), align=8)
        row_bytes = ir.VectorType(ir.IntType(16), 8)
        builder.store(ir.Constant(row_bytes, [LINE] * 8), place(ROW_BYTES_AT, row_bytes), align=8)
        builder.store(rows, place(ROWS_AT, INT64), align=8)
        call(builder, "llvm.x86.ldtilecfg", VOID, at)


def make_amx_tile(name, instruction):
    """An intrinsic that is called with the fields of `TileOperands`, with 1 to `AMX_ROWS` rows and
    a multiple of `AMX_GROUPS` groups. `instruction` is LLVM's name of the product."""

    def build(context, builder, signature, args):
        is_one = builder.icmp_signed("<=", TileOperands(*args).rows, int64(TILE_ROWS))
        with builder.if_else(is_one) as (one, two):
            for num_tiles, case in ((1, one), (2, two)):
                with case:
                    function = _function(builder.module, name, instruction, num_tiles)
                    builder.call(function, args)
        return context.get_dummy_value()

    def tile(typing, w, x, x_stride, rows, groups, sums, ahead, ahead_step, tiles):
        return types.void(*[types.int64] * len(TileOperands._fields)), build

    return intrinsic(tile)


def _function(module, name, instruction, num_tiles):
    """The product of one or two tiles of x with a panel."""
    kind = ir.FunctionType(VOID, [INT64] * len(TileOperands._fields))
    function = ir.Function(module, kind, f"{name}_{num_tiles}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    tile, whole = TileOperands(*function.args), int64(TILE_ROWS)
    top, bottom = (tile.rows, whole) if num_tiles == 1 else (whole, builder.sub(tile.rows, whole))
    configure(builder, builder.add(tile.sums, int64(SUMS_BYTES)), top, bottom)
    sums, x = SUMS[:num_tiles], X[:num_tiles]
    for register in (each for row in sums for each in row):
        tile_instruction(builder, "tilezero", register)
    lines = [tile.x, builder.add(tile.x, builder.mul(tile.x_stride, whole))]
    ahead_step = builder.mul(tile.ahead_step, int64(AMX_GROUPS))
    ahead = cgutils.alloca_once_value(builder, tile.ahead)
    with cgutils.for_range_slice(builder, int64(0), tile.groups, int64(AMX_GROUPS)) as (group, _):
        far = builder.load(ahead)
        with cgutils.for_range_slice(builder, int64(0), ahead_step, int64(LINE)) as (line, _):
            prefetch(builder, builder.add(far, line))
        builder.store(builder.add(far, ahead_step), ahead)
        shift = builder.mul(group, int64(4))
        for register, line in zip(x, lines, strict=False):
            at = builder.add(line, shift)
            tile_instruction(builder, "tileloadd64", register, at, tile.x_stride)
        panel = builder.add(tile.w, builder.mul(group, int64(GROUP_BYTES)))
        for half, weights in enumerate(WEIGHTS):
            at = builder.add(panel, int64(half * 4 * LANES))
            tile_instruction(builder, "tileloadd64", weights, at, int64(GROUP_BYTES))
            for row, register in zip(sums, x, strict=True):
                tile_instruction(builder, instruction, row[half], register, weights)
    for number, row in enumerate(sums):
        for half in range(VECTORS):
            shift = number * TILE_ROWS * GROUP_BYTES + half * 4 * LANES
            at = builder.add(tile.sums, int64(shift))
            tile_instruction(builder, "tilestored64", row[half], at, int64(GROUP_BYTES))
    builder.ret_void()
    return function


@intrinsic
def release_tiles(typing):
    """Give the tile registers back, if there are any: a switch of threads would save them."""

    def build(context, builder, signature, args):
        if HAS_AMX:
            call(builder, "llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), build


amx_bfloat16_tile = make_amx_tile("amx_bfloat16", "tdpbf16ps")
amx_uint8_tile = make_amx_tile("amx_uint8", "tdpbusd")
