"""The register tile of a linear layer over packed weights, for each form of numbers.

A panel is `WIDTH` output channels. Of each, a group of neighbours in k lies in one lane of the
panel's row, so that one vector instruction takes a group of x, repeated, into the sums of
`LANES` channels at once: no sums across lanes, and memory is read from front to back. Each sum
takes in k in order, so that a row's result cannot depend on the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from typing import NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.features import has
from engine.worker.cpu.intrinsics import INT32, word
from engine.worker.cpu.kernels.dot_tiles import LANES, VECTOR, fma, prefetch

VECTORS = 2  # of sums in a row of a panel
WIDTH = VECTORS * LANES
MOST_ROWS = 6 if LANES == 8 else 8  # of a tile, whose sums stay in registers
INT_ROWS = 6 if LANES == 8 else 8  # products need registers, too
GROUPS = 4  # of k are padded to a multiple of this, where both are rounded
LINE = 64  # bytes of a cache line
PAIR, QUAD = 2, 4

IS_X86 = llvmlite.binding.get_process_triple().startswith("x86_64")
SUMS = ir.VectorType(INT32, LANES)
SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
OCTETS = ir.VectorType(ir.IntType(8), 4 * LANES)
NARROW = ir.VectorType(ir.IntType(8), 2 * LANES)


def _pair_products():
    """LLVM's name of the instruction that multiplies 16-bit pairs and adds neighbours, if any."""
    if LANES == 16:
        return "llvm.x86.avx512.pmaddw.d.512" if has("avx512bw") else None
    return "llvm.x86.avx2.pmadd.wd" if has("avx2") else None


def _accumulated_pairs():
    """LLVM's name of VNNI's instruction that also adds the pairs' products to the sums, if any."""
    if LANES == 16:
        return "llvm.x86.avx512.vpdpwssd.512" if has("avx512vnni") else None
    return "llvm.x86.avx512.vpdpwssd.256" if has("avxvnni") else None


def _quad_products():
    """LLVM's name of VNNI's instruction: unsigned times signed octets, fours of them added."""
    if LANES == 16:
        return "llvm.x86.avx512.vpdpbusd.512" if has("avx512vnni") else None
    return "llvm.x86.avx512.vpdpbusd.256" if has("avxvnni") else None


class Form(NamedTuple):
    """How x and w are multiplied: `group` of k at a time, which have 32 bits in x."""

    group: int
    lane_bytes: int  # of weights
    most_rows: int
    most_turn: int  # groups in a turn of the loop
    add: object  # `(builder, sums, weights, x) -> sums`
    weights: ir.VectorType


def _call(builder, name, kind, *args):
    function = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def _add_fields(builder, sums, weights, x, count, widen):
    """The products of the `count` parts of each lane, where no instruction does it.

    Weights are signed; `widen` says whether x is, by what it shifts with.
    """
    size = 32 // count
    down = ir.Constant(SUMS, [32 - size] * LANES)
    for field in range(count):
        up = ir.Constant(SUMS, [32 - size * (field + 1)] * LANES)
        factors = (
            builder.ashr(builder.shl(builder.bitcast(weights, SUMS), up), down),
            widen(builder.shl(x, up), down),
        )
        sums = builder.add(sums, builder.mul(*factors))
    return sums


def _add_pairs(instruction, accumulating):
    """int16 x times int8 weights, in pairs."""

    def add(builder, sums, weights, x):
        weights = builder.sext(weights, SHORTS)
        if accumulating is not None:
            return _call(builder, accumulating, SUMS, sums, builder.bitcast(weights, SUMS), x)
        if instruction is None:
            return _add_fields(builder, sums, weights, x, 2, builder.ashr)
        products = _call(builder, instruction, SUMS, weights, builder.bitcast(x, SHORTS))
        return builder.add(products, sums)

    return add


def _add_quads(instruction):
    """uint8 x times int8 weights, in fours."""

    def add(builder, sums, weights, x):
        if instruction is None:
            return _add_fields(builder, sums, weights, x, 4, builder.lshr)
        return _call(builder, instruction, SUMS, sums, x, builder.bitcast(weights, SUMS))

    return add


def _add_float(builder, sums, weights, x):
    """float32 x times float32 weights."""
    factors = [builder.bitcast(each, VECTOR) for each in (weights, x, sums)]
    return builder.bitcast(fma(builder, *factors), SUMS)


HAS_QUADS = _quad_products() is not None
FLOATS = Form(1, 4, MOST_ROWS, 1, _add_float, SUMS)
PAIRS = Form(PAIR, 2, INT_ROWS, GROUPS, _add_pairs(_pair_products(), _accumulated_pairs()), NARROW)
QUADS = Form(QUAD, 4, INT_ROWS, GROUPS, _add_quads(_quad_products()), OCTETS)


class TileOperands(NamedTuple):
    """Byte addresses and strides. `groups` of k is a multiple of the form's `most_turn`."""

    w: ir.Value  # a panel
    x: ir.Value
    x_stride: ir.Value
    rows: ir.Value  # 1 to the form's `most_rows`
    groups: ir.Value
    sums: ir.Value  # [rows, WIDTH], to be written
    ahead: ir.Value  # what is prefetched, `ahead_step` bytes further each turn
    ahead_step: ir.Value


def make_packed_tile(form):
    """`sums[m, n] = sum over k of x[m, k] * w[k, n]`; called with what `TileOperands` names."""

    def build(context, builder, signature, args):
        for rows in range(1, form.most_rows + 1):
            is_it = builder.icmp_signed("==", TileOperands(*args).rows, word(rows))
            with builder.if_then(is_it):
                builder.call(_function(builder.module, form, rows), args)
        return context.get_dummy_value()

    def packed_tile(typing, w, x, x_stride, rows, groups, sums, ahead, ahead_step):
        return types.void(*[types.int64] * len(TileOperands._fields)), build

    return intrinsic(packed_tile)


def _function(module, form, rows):
    """The tile for a number of rows, not inlined: it needs all registers for itself."""
    kind = ir.FunctionType(ir.VoidType(), [word(0).type] * len(TileOperands._fields))
    function = ir.Function(module, kind, f"tile_{form.group}_{form.lane_bytes}_{rows}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    _build_rows(builder, form, TileOperands(*function.args), rows)
    builder.ret_void()
    return function


def _build_rows(builder, form, tile, rows):
    lines = [builder.add(tile.x, builder.mul(tile.x_stride, word(m))) for m in range(rows)]
    sums = [[cgutils.alloca_once(builder, SUMS) for _ in range(VECTORS)] for _ in lines]
    for one in (one for row in sums for one in row):
        builder.store(ir.Constant(SUMS, [0] * LANES), one)
    ahead = cgutils.alloca_once_value(builder, tile.ahead)
    turn = max(1, form.most_turn // rows)  # with more the registers run out
    ahead_step = builder.mul(tile.ahead_step, word(turn))
    with cgutils.for_range_slice(builder, word(0), tile.groups, word(turn)) as (group, _):
        far = builder.load(ahead)
        for line in range(0, turn * WIDTH * form.lane_bytes, LINE):
            prefetch(builder, builder.add(far, word(line)))
        builder.store(builder.add(far, ahead_step), ahead)
        for part in range(turn):
            _add_group(builder, form, tile.w, lines, sums, builder.add(group, word(part)))
    for m, row in enumerate(sums):
        for v, one in enumerate(row):
            place = builder.add(tile.sums, word((m * WIDTH + v * LANES) * 4))
            builder.store(builder.load(one), _pointer(builder, place, SUMS), align=4)


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _add_group(builder, form, w, lines, sums, group):
    """One group of k: every x times the whole width of the panel."""
    row_bytes = LANES * form.lane_bytes
    at = builder.add(w, builder.mul(group, word(VECTORS * row_bytes)))
    weights = [
        builder.load(_pointer(builder, builder.add(at, word(v * row_bytes)), form.weights), align=4)
        for v in range(VECTORS)
    ]
    undefined, spread = ir.Constant(SUMS, ir.Undefined), ir.Constant(SUMS, [0] * LANES)
    shift = builder.mul(group, word(4))
    for line, row in zip(lines, sums, strict=True):
        x = builder.load(_pointer(builder, builder.add(line, shift), INT32), align=2)
        x = builder.insert_element(undefined, x, ir.Constant(INT32, 0))
        x = builder.shuffle_vector(x, undefined, spread)
        for vector, one in zip(weights, row, strict=True):
            added = form.add(builder, builder.load(one), vector, x)
            builder.store(_pinned(builder, added), one)


def _pinned(builder, sums):
    """The same in its register: an instruction that is none, but that LLVM moves nothing across.
    Left alone it unrolls and reorders until it is out of registers."""
    if not IS_X86:
        return sums
    kind = ir.FunctionType(SUMS, [SUMS])
    return builder.asm(kind, "", "=v,0", [sums], side_effect=False)


float_tile = make_packed_tile(FLOATS)
pair_tile = make_packed_tile(PAIRS)
quad_tile = make_packed_tile(QUADS)


@intrinsic
def sums_of_tile(typing):
    """The address of room on the stack for the sums of a tile."""

    def build(context, builder, signature, args):
        room = cgutils.alloca_once(builder, ir.ArrayType(INT32, MOST_ROWS * WIDTH))
        room.align = LINE
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(), build
