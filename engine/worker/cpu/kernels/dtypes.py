"""Number formats in memory: loaded as vectors of float32, stored one by one.

A dtype code is a literal in the code of a kernel, so that each kernel is compiled for one dtype.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
import platform

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.features import has
from engine.worker.cpu.intrinsics import FLOAT, INT32, int64
from engine.worker.cpu.kernels.vectors import LANES, call

FLOAT32, FLOAT16, BFLOAT16, INT8, BFLOAT16_PAIRS, INT8_PAIRS, JOINED_PAIRS = range(7)
NAMES = ("float32", "float16", "bfloat16", "int8")  # by code
ITEM_BYTES = (4, 2, 2, 1, 2, 1, 2)
WITH_SCALES = (INT8, INT8_PAIRS)
IN_PAIRS = (BFLOAT16_PAIRS, INT8_PAIRS, JOINED_PAIRS)  # multiplied two at a time, as bfloat16
MAX_FLOAT16 = 65504.0
# AVX-512 BF16: instructions that multiply pairs of bfloat16 and add to float32, and that round.
HAS_BFLOAT16_PAIRS = LANES == 16 and has("avx512bf16")
ADD_PAIRS = "llvm.x86.avx512bf16.dpbf16ps.512"
TO_BFLOAT16 = "llvm.x86.avx512bf16.cvtneps2bf16.512"

INT16, INT8_TYPE, HALF = ir.IntType(16), ir.IntType(8), ir.HalfType()
ELEMENTS = (FLOAT, HALF, INT16, INT8_TYPE, INT16, INT8_TYPE)


def dtype_code(dtype: torch.dtype) -> int:
    """The code of a tensor's dtype."""
    return NAMES.index(str(dtype).removeprefix("torch."))


def has_half() -> bool:
    """Whether the CPU has instructions that convert between float16 and float32."""
    return has("f16c") or platform.machine() in ("aarch64", "arm64")


def _like(value, element):
    """A vector type of as many `element`s as `value` has, or `element` if it is a scalar."""
    kind = value.type
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _constant(value, number):
    kind = value.type
    is_vector = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [number] * kind.count if is_vector else number)


def load(builder, dtype, address, lanes):
    """`lanes` numbers at a byte address as a vector of float32; `lanes` 0: a scalar float32."""
    element = ELEMENTS[dtype]
    whole = ir.VectorType(element, lanes) if lanes else element
    raw = builder.load(builder.inttoptr(address, whole.as_pointer()), align=ITEM_BYTES[dtype])
    if dtype == FLOAT16:
        return builder.fpext(raw, _like(raw, FLOAT))
    if dtype in (BFLOAT16, BFLOAT16_PAIRS):
        wide = builder.zext(raw, _like(raw, INT32))
        return builder.bitcast(builder.shl(wide, _constant(wide, 16)), _like(raw, FLOAT))
    if dtype in WITH_SCALES:
        return builder.sitofp(builder.sext(raw, _like(raw, INT32)), _like(raw, FLOAT))
    return raw


def _to_float16(builder, value):
    """Round to nearest; finite values beyond the range become the largest finite float16."""
    for sign, beyond, within in ((1, ">", "<"), (-1, "<", ">")):
        limit, infinite = (_constant(value, sign * one) for one in (MAX_FLOAT16, float("inf")))
        is_beyond = builder.and_(
            builder.fcmp_ordered(beyond, value, limit),
            builder.fcmp_ordered(within, value, infinite),
        )
        value = builder.select(is_beyond, limit, value)
    return builder.fptrunc(value, _like(value, HALF))


def _to_bfloat16(builder, value):
    """Round to nearest, ties to even; NaN stays NaN."""
    raw = builder.bitcast(value, _like(value, INT32))
    half, one, rounding, quiet_bit = (_constant(raw, n) for n in (16, 1, 0x7FFF, 0x400000))
    last = builder.and_(builder.lshr(raw, half), one)
    rounded = builder.add(builder.add(raw, rounding), last)
    quiet = builder.or_(raw, quiet_bit)
    is_nan = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, half), _like(raw, INT16))


def _to_int8(builder, value):
    """An integral number in range as int8; NaN becomes 0."""
    is_nan = builder.fcmp_unordered("uno", value, value)
    number = builder.select(is_nan, ir.Constant(FLOAT, 0.0), value)
    return builder.fptosi(number, INT8_TYPE)


_CONVERSIONS = {FLOAT16: _to_float16, BFLOAT16: _to_bfloat16, INT8: _to_int8}


@intrinsic(prefer_literal=True)
def load_one(typing, dtype, address):
    """The number at an address as float32."""

    def build(context, builder, signature, args):
        return load(builder, signature.args[0].literal_value, args[1], 0)

    return types.float32(dtype, types.int64), build


@intrinsic(prefer_literal=True)
def store_one(typing, dtype, address, value):
    """Store a float32 at an address, rounded to the dtype."""

    def build(context, builder, signature, args):
        code = signature.args[0].literal_value
        number = _CONVERSIONS[code](builder, args[2]) if code in _CONVERSIONS else args[2]
        target = builder.inttoptr(args[1], ELEMENTS[code].as_pointer())
        builder.store(number, target, align=ITEM_BYTES[code])
        return context.get_dummy_value()

    return types.void(dtype, types.int64, types.float32), build


@intrinsic(prefer_literal=True)
def store_lanes(typing, dtype, source, target, step):
    """Store `LANES` floats at address `source`, rounded to the dtype, `step` bytes apart."""

    def build(context, builder, signature, args):
        code, (_, source, target, step) = signature.args[0].literal_value, args
        found = load(builder, FLOAT32, source, LANES)
        numbers = _CONVERSIONS[code](builder, found) if code in _CONVERSIONS else found
        for lane in range(LANES):
            one = builder.extract_element(numbers, ir.Constant(INT32, lane))
            at = builder.add(target, builder.mul(step, int64(lane)))
            place = builder.inttoptr(at, ELEMENTS[code].as_pointer())
            builder.store(one, place, align=ITEM_BYTES[code])
        return context.get_dummy_value()

    return types.void(dtype, *[types.int64] * 3), build


@intrinsic
def convert_to_bfloat16_lanes(typing, x, y, count):
    """Round `count` floats at address x to bfloat16 at address y; returns how many were converted:
    whole vectors only. LLVM finds no vectors for this loop by itself."""

    def build(context, builder, signature, args):
        x, y, count = args
        end = builder.and_(count, int64(-LANES))
        with cgutils.for_range_slice(builder, int64(0), end, int64(LANES)) as (at, _):
            found = load(builder, FLOAT32, builder.add(x, builder.mul(at, int64(4))), LANES)
            number = (
                call(builder, TO_BFLOAT16, ir.VectorType(INT16, LANES), found)
                if HAS_BFLOAT16_PAIRS
                else _to_bfloat16(builder, found)
            )
            target = builder.add(y, builder.mul(at, int64(2)))
            builder.store(number, builder.inttoptr(target, number.type.as_pointer()), align=2)
        return end

    return types.int64(*[types.int64] * 3), build
