"""The register tile of a linear layer over packed weights, for each `TileFormat`.

A panel is `WIDTH` output channels. A row of a panel holds one group of neighbours in k of each of
these channels, one group per lane, so that one vector instruction multiplies a group of x,
broadcast to all lanes, into the sums of `LANES` channels: no sum runs across lanes, and weights are
read in the order of their addresses. Each sum takes in k in order, so a row's result cannot depend
on the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from typing import NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import INT32, int64
from engine.worker.cpu.kernels.linears import tile_formats
from engine.worker.cpu.kernels.linears.tile_formats import AMX_ROWS, MAX_ROWS
from engine.worker.cpu.kernels.vectors import INT32S, LANES, LINE, broadcast, pointer, prefetch

VECTORS = 2  # vectors of sums for each row of x
WIDTH = VECTORS * LANES  # output channels of a panel
SUMS_BYTES = 4 * WIDTH * max(MAX_ROWS, AMX_ROWS)  # the sums of a tile
CONFIG_BYTES = 64  # the configuration of AMX
INT8 = ir.IntType(8)

IS_X86 = llvmlite.binding.get_process_triple().startswith("x86_64")


class TileOperands(NamedTuple):
    """The arguments of a tile: byte addresses, byte strides and counts, all int64.

    `groups` of k is a multiple of the format's `max_unroll`.
    """

    w: ir.Value  # a panel
    x: ir.Value
    x_stride: ir.Value
    rows: ir.Value  # 1 to MAX_ROWS
    groups: ir.Value
    sums: ir.Value  # [rows, WIDTH] of 32 bits, the result
    ahead: ir.Value  # what to prefetch, `ahead_step` bytes further for each group
    ahead_step: ir.Value
    tiles: ir.Value  # the number of tiles of rows that read the same weights


def make_tile(name, max_rows, build_rows):
    """An intrinsic that is called with the fields of `TileOperands`.

    `build_rows(builder, tile, rows)` builds the code for one number of rows.
    """

    def build(builder, tile):
        call_tile(builder, name, range(1, max_rows + 1), build_rows, tile)

    return make_intrinsic(build)


def make_intrinsic(build_tile):
    """An intrinsic that is called with the fields of `TileOperands`, built by
    `build_tile(builder, tile)`."""

    def build(context, builder, signature, args):
        build_tile(builder, TileOperands(*args))
        return context.get_dummy_value()

    def tile(typing, w, x, x_stride, rows, groups, sums, ahead, ahead_step, tiles):
        return types.void(*[types.int64] * len(TileOperands._fields)), build

    return intrinsic(tile)


def call_tile(builder, name, numbers, build_rows, tile):
    """Call the code for the tile's rows, which are one of `numbers`."""
    for rows in numbers:
        is_it = builder.icmp_signed("==", tile.rows, int64(rows))
        with builder.if_then(is_it):
            builder.call(add_function(builder.module, f"{name}_{rows}", rows, build_rows), tile)


def add_function(module, name, rows, build_rows):
    """A tile for a number of rows. It is not inlined, because it needs all registers."""
    kind = ir.FunctionType(ir.VoidType(), [int64(0).type] * len(TileOperands._fields))
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    build_rows(builder, TileOperands(*function.args), rows)
    builder.ret_void()
    return function


def make_packed_tile(tile_format):
    """`sums[m, n] = sum over k of x[m, k] * w[k, n]`."""

    def build_rows(builder, tile, rows):
        _build_rows(builder, tile_format, tile, rows)

    weights = tile_format.weights.element
    return make_tile(f"tile_{tile_format.group}_of_{weights}", MAX_ROWS, build_rows)


def _build_rows(builder, tile_format, tile, rows):
    lines = [builder.add(tile.x, builder.mul(tile.x_stride, int64(m))) for m in range(rows)]
    sums = [[cgutils.alloca_once(builder, INT32S) for _ in range(VECTORS)] for _ in lines]
    for one in (one for row in sums for one in row):
        builder.store(ir.Constant(INT32S, [0] * LANES), one)
    ahead = cgutils.alloca_once_value(builder, tile.ahead)
    unroll = max(1, tile_format.max_unroll // rows)  # with more the registers run out
    ahead_step = builder.mul(tile.ahead_step, int64(unroll))
    with cgutils.for_range_slice(builder, int64(0), tile.groups, int64(unroll)) as (group, _):
        far = builder.load(ahead)
        for line in range(0, unroll * WIDTH * tile_format.lane_bytes, LINE):
            prefetch(builder, builder.add(far, int64(line)))
        builder.store(builder.add(far, ahead_step), ahead)
        for part in range(unroll):
            here = builder.add(group, int64(part))
            _add_group(builder, tile_format, tile.w, lines, sums, here)
    for m, row in enumerate(sums):
        for v, one in enumerate(row):
            target = builder.add(tile.sums, int64((m * WIDTH + v * LANES) * 4))
            builder.store(builder.load(one), pointer(builder, target, INT32S), align=4)


def _add_group(builder, tile_format, w, lines, sums, group):
    """One group of k: every row of x times the whole width of the panel."""
    vector_bytes = LANES * tile_format.lane_bytes
    at = builder.add(w, builder.mul(group, int64(VECTORS * vector_bytes)))
    places = [builder.add(at, int64(v * vector_bytes)) for v in range(VECTORS)]
    weights = [
        builder.load(pointer(builder, place, tile_format.weights), align=4) for place in places
    ]
    shift = builder.mul(group, int64(4))
    for line, row in zip(lines, sums, strict=True):
        x = builder.load(pointer(builder, builder.add(line, shift), INT32), align=2)
        x = broadcast(builder, x)
        for vector, one in zip(weights, row, strict=True):
            added = tile_format.add(builder, builder.load(one), vector, x)
            builder.store(pinned(builder, added), one)


def pinned(builder, vector, *, in_order=False):
    """The same vector after an empty assembly instruction, whose input LLVM does not look through.

    Without it LLVM unrolls and reorders until it runs out of registers. All that are `in_order`
    stay so: their vectors are computed one after the other.
    """
    if not IS_X86:
        return vector
    kind = ir.FunctionType(vector.type, [vector.type])
    return builder.asm(kind, "", "=v,0", [vector], side_effect=in_order)


float32_tile = make_packed_tile(tile_formats.FLOAT32)
float16_tile = make_packed_tile(tile_formats.FLOAT16)
bfloat16_tile = make_packed_tile(tile_formats.BFLOAT16)
int16_tile = make_packed_tile(tile_formats.INT16_INPUTS)
uint8_tile = make_packed_tile(tile_formats.UINT8_INPUTS)


@intrinsic
def tile_sums(typing):
    """The address of stack memory for the sums of a tile.

    Behind them is what a tile left for the next: the configuration of the tile registers by
    `amx_tiles`, or where `grouped_tiles` unpacked weights. It is nothing yet.
    """

    def build(context, builder, signature, args):
        memory = cgutils.alloca_once(builder, ir.ArrayType(INT8, SUMS_BYTES + CONFIG_BYTES))
        memory.align = LINE
        address = builder.ptrtoint(memory, ir.IntType(64))
        configured = ir.VectorType(INT8, CONFIG_BYTES)
        place = pointer(builder, builder.add(address, int64(SUMS_BYTES)), configured)
        builder.store(ir.Constant(configured, [0] * CONFIG_BYTES), place)
        return address

    return types.int64(), build
