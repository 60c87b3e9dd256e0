"""The register tile of a linear layer over int4 weights in groups of 32 inputs, each with a scale.

A panel is `WIDTH` output channels, as in `packed_tiles`. For each group it holds the scales of the
channels in float16, then `BLOCKS` runs of 8 inputs, of which each lane has 32 bits. A weight is
`scale * (nibble - 8)` with a nibble of 0 to 15. For each group a row of x holds an int32, -8 times
the sum of the group's inputs, and then the inputs: the sums of a group start at that int32, and
nibbles are multiplied as unsigned numbers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import INT32, int64
from engine.worker.cpu.kernels.dtypes import FLOAT16, load
from engine.worker.cpu.kernels.packed_tiles import VECTORS, WIDTH, TileOperands, pinned
from engine.worker.cpu.kernels.tile_formats import (
    HAS_VNNI,
    INT16S,
    PAIR,
    QUAD,
    QUAD_SUMS,
    add_fields,
    add_int16_pairs,
)
from engine.worker.cpu.kernels.vectors import (
    FLOATS,
    INT32S,
    LANES,
    LINE,
    broadcast,
    call,
    fma,
    pointer,
    prefetch,
)

GROUP = 32  # inputs with one scale
BLOCK = 8  # inputs in 32 bits of a lane
BLOCKS = GROUP // BLOCK
MIDDLE = 8  # the nibble that stands for 0
SCALE_BYTES = 2 * WIDTH
GROUP_BYTES = SCALE_BYTES + GROUP * WIDTH // 2  # of a panel


class NibbleFormat(NamedTuple):
    """How the nibbles of a lane are multiplied by x."""

    inputs: int  # multiplied by one instruction, which have 32 bits in x
    mask: int  # of the nibbles that are multiplied at once
    add: object  # `(builder, sums, nibbles, x) -> sums`

    @property
    def x_group_bytes(self) -> int:
        return 4 + GROUP * 4 // self.inputs


def _add_quads(builder, sums, nibbles, x):
    """Four unsigned nibbles times int8 inputs."""
    if QUAD_SUMS is None:
        return add_fields(builder, sums, x, nibbles, 4, builder.lshr)
    return call(builder, QUAD_SUMS, INT32S, sums, nibbles, x)


def _add_pairs(builder, sums, nibbles, x):
    """Two nibbles times int16 inputs."""
    return add_int16_pairs(builder, sums, builder.bitcast(nibbles, INT16S), x)


INT8_NIBBLES = NibbleFormat(QUAD, 0x0F0F0F0F, _add_quads)
INT16_NIBBLES = NibbleFormat(PAIR, 0x000F000F, _add_pairs)
FASTEST = INT8_NIBBLES if HAS_VNNI else INT16_NIBBLES
MAX_ROWS = 6 if LANES == 16 else 4


def make_grouped_tile(nibbles):
    """`sums[m, n] = sum over groups of scale[n] * sum over k of x[m, k] * (w[k, n] - 8)`, float32.

    Called with the fields of `TileOperands`, where `groups` are groups of `GROUP` inputs.
    """

    def build(context, builder, signature, args):
        for rows in range(1, MAX_ROWS + 1):
            is_it = builder.icmp_signed("==", TileOperands(*args).rows, int64(rows))
            with builder.if_then(is_it):
                builder.call(_function(builder.module, nibbles, rows), args)
        return context.get_dummy_value()

    def grouped_tile(typing, w, x, x_stride, rows, groups, sums, ahead, ahead_step):
        return types.void(*[types.int64] * len(TileOperands._fields)), build

    return intrinsic(grouped_tile)


def _function(module, nibbles, rows):
    """The tile for a number of rows. It is not inlined, because it needs all registers."""
    kind = ir.FunctionType(ir.VoidType(), [int64(0).type] * len(TileOperands._fields))
    function = ir.Function(module, kind, f"grouped_tile_{nibbles.inputs}_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    _build_rows(builder, nibbles, TileOperands(*function.args), rows)
    builder.ret_void()
    return function


def _build_rows(builder, nibbles, tile, rows):
    lines = [builder.add(tile.x, builder.mul(tile.x_stride, int64(m))) for m in range(rows)]
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS)] for _ in lines]
    with cgutils.for_range_slice(builder, int64(0), tile.groups, int64(1)) as (group, _):
        far = builder.add(tile.ahead, builder.mul(group, tile.ahead_step))
        for line in range(0, GROUP_BYTES, LINE):
            prefetch(builder, builder.add(far, int64(line)))
        panel = builder.add(tile.w, builder.mul(group, int64(GROUP_BYTES)))
        shift = builder.mul(group, int64(nibbles.x_group_bytes))
        sums = _group_sums(builder, nibbles, panel, [builder.add(line, shift) for line in lines])
        for v in range(VECTORS):
            scale = load(builder, FLOAT16, builder.add(panel, int64(2 * LANES * v)), LANES)
            for row_totals, row_sums in zip(totals, sums, strict=True):
                number = builder.sitofp(row_sums[v], FLOATS)
                builder.store(
                    fma(builder, number, scale, builder.load(row_totals[v])), row_totals[v]
                )
    for m, row in enumerate(totals):
        for v, one in enumerate(row):
            target = builder.add(tile.sums, int64((m * WIDTH + v * LANES) * 4))
            builder.store(builder.load(one), pointer(builder, target, FLOATS), align=4)


def _group_sums(builder, nibbles, panel, lines):
    """The int32 sums over one group, `[rows][VECTORS]` vectors."""
    sums = []
    for line in lines:
        start = broadcast(builder, builder.load(pointer(builder, line, INT32), align=4))
        sums.append([start] * VECTORS)
    mask = ir.Constant(INT32S, [nibbles.mask] * LANES)
    for block in range(BLOCKS):
        at = SCALE_BYTES + block * WIDTH * 4
        packed = [
            builder.load(
                pointer(builder, builder.add(panel, int64(at + 4 * LANES * v)), INT32S), align=4
            )
            for v in range(VECTORS)
        ]
        for part in range(BLOCK // nibbles.inputs):
            bits = ir.Constant(INT32S, [4 * part] * LANES)
            weights = [builder.and_(builder.lshr(one, bits), mask) for one in packed]
            place = 4 + 4 * (block * (BLOCK // nibbles.inputs) + part)
            for line, row in zip(lines, sums, strict=True):
                address = builder.add(line, int64(place))
                x = broadcast(builder, builder.load(pointer(builder, address, INT32), align=4))
                for v, weight in enumerate(weights):
                    row[v] = pinned(builder, nibbles.add(builder, row[v], weight, x))
    return sums


int8_tile = make_grouped_tile(INT8_NIBBLES)
int16_tile = make_grouped_tile(INT16_NIBBLES)
