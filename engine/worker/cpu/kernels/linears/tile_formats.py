"""How the tiles of `packed_tiles` multiply: one `TileFormat` for each format of inputs and weights.

Each uses the widest dot-product instruction of the CPU, and plain vector arithmetic with the same
meaning if the CPU has none.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from typing import NamedTuple

from llvmlite import ir

from engine.worker.cpu.features import has, has_amx
from engine.worker.cpu.kernels.dtypes import ADD_PAIRS, HAS_BFLOAT16_PAIRS
from engine.worker.cpu.kernels.vectors import FLOATS, INT32S, LANES, call, fma

PAIR, QUAD = 2, 4  # neighbours in k that one 32-bit lane holds
MAX_ROWS = 6 if LANES == 8 else 8  # rows of a tile whose sums stay in registers
UNROLL = 4  # groups of k
HAS_AMX = has_amx()
AMX_ROWS = 32  # rows of a tile
AMX_GROUPS = 16  # groups of k in one instruction
PADDING = AMX_GROUPS if HAS_AMX else UNROLL  # k is padded to a multiple of so many groups

INT16S = ir.VectorType(ir.IntType(16), 2 * LANES)
INT16_LANES = ir.VectorType(ir.IntType(16), LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
INT8S = ir.VectorType(ir.IntType(8), 4 * LANES)
NARROW_INT8S = ir.VectorType(ir.IntType(8), 2 * LANES)


def _instruction(in_512, feature_512, in_256, feature_256):
    """The LLVM intrinsic for this CPU's vector width, None if it lacks the feature."""
    name, feature = (in_512, feature_512) if LANES == 16 else (in_256, feature_256)
    return f"llvm.x86.{name}" if has(feature) else None


PAIR_PRODUCTS = _instruction("avx512.pmaddw.d.512", "avx512bw", "avx2.pmadd.wd", "avx2")
PAIR_SUMS = _instruction("avx512.vpdpwssd.512", "avx512vnni", "avx512.vpdpwssd.256", "avxvnni")
QUAD_SUMS = _instruction("avx512.vpdpbusd.512", "avx512vnni", "avx512.vpdpbusd.256", "avxvnni")
HAS_VNNI = QUAD_SUMS is not None
HAS_BFLOAT16 = HAS_BFLOAT16_PAIRS or HAS_AMX


class TileFormat(NamedTuple):
    """How x and w are multiplied: `group` neighbours in k at a time, 32 bits of x."""

    group: int
    lane_bytes: int  # bytes of weights for each group and output channel
    max_unroll: int  # groups in an iteration of the loop
    add: object  # `(builder, sums, weights, x) -> sums`; sums and x are int32 vectors
    weights: ir.VectorType


def add_fields(builder, sums, weights, x, count, widen_x):
    """The products of the `count` fields of each lane, without a dot-product instruction.

    Weights are signed; `widen_x` is the shift that sign- or zero-extends x.
    """
    size = 32 // count
    down = ir.Constant(INT32S, [32 - size] * LANES)
    for field in range(count):
        up = ir.Constant(INT32S, [32 - size * (field + 1)] * LANES)
        factors = (
            builder.ashr(builder.shl(builder.bitcast(weights, INT32S), up), down),
            widen_x(builder.shl(x, up), down),
        )
        sums = builder.add(sums, builder.mul(*factors))
    return sums


def add_int16_pairs(builder, sums, weights, x):
    """int16 x times int16 weights, in pairs."""
    if PAIR_SUMS is not None:
        return call(builder, PAIR_SUMS, INT32S, sums, builder.bitcast(weights, INT32S), x)
    if PAIR_PRODUCTS is None:
        return add_fields(builder, sums, weights, x, 2, builder.ashr)
    pairs = (builder.bitcast(each, INT16S) for each in (weights, x))
    products = call(builder, PAIR_PRODUCTS, INT32S, *pairs)
    return builder.add(products, sums)


def _add_pairs(builder, sums, weights, x):
    """int16 x times int8 weights, in pairs."""
    return add_int16_pairs(builder, sums, builder.sext(weights, INT16S), x)


def _add_quads(builder, sums, weights, x):
    """uint8 x times int8 weights, in fours."""
    if QUAD_SUMS is None:
        return add_fields(builder, sums, weights, x, 4, builder.lshr)
    return call(builder, QUAD_SUMS, INT32S, sums, x, builder.bitcast(weights, INT32S))


def _add_float32(builder, sums, weights, x):
    factor, other, total = (builder.bitcast(each, FLOATS) for each in (weights, x, sums))
    return builder.bitcast(fma(builder, factor, other, total), INT32S)


def _add_bfloat16_pairs(builder, sums, weights, x):
    """bfloat16 x times bfloat16 weights, in pairs, added in float32."""
    total = builder.bitcast(sums, FLOATS)
    return builder.bitcast(call(builder, ADD_PAIRS, FLOATS, total, weights, x), INT32S)


def _add_widened(builder, sums, weights, x):
    """float32 x times bfloat16 weights, whose bits are the upper half of a float32."""
    half = ir.Constant(INT32S, [16] * LANES)
    return _add_float32(builder, sums, builder.shl(builder.zext(weights, INT32S), half), x)


def _add_halves(builder, sums, weights, x):
    """float32 x times float16 weights."""
    wide = builder.fpext(weights, FLOATS)
    return _add_float32(builder, sums, wide, x)


FLOAT32 = TileFormat(1, 4, 1, _add_float32, INT32S)
FLOAT16 = TileFormat(1, 2, 1, _add_halves, HALVES)
BFLOAT16 = (
    TileFormat(PAIR, 4, UNROLL, _add_bfloat16_pairs, INT32S)
    if HAS_BFLOAT16
    else TileFormat(1, 2, 1, _add_widened, INT16_LANES)
)
INT16_INPUTS = TileFormat(PAIR, 2, UNROLL, _add_pairs, NARROW_INT8S)
UINT8_INPUTS = TileFormat(QUAD, 4, UNROLL, _add_quads, INT8S)
