"""How numbers may lie in memory: read as vectors of float32, written one by one.

A kind is a literal in the code of a kernel, so that each kernel is compiled for its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
import platform

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.worker.cpu.features import has
from engine.worker.cpu.intrinsics import FLOAT, INT32

FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)
ITEM_BYTES = (4, 2, 2, 1)
MOST_HALF = 65504.0

INT16, INT8_TYPE, HALF = ir.IntType(16), ir.IntType(8), ir.HalfType()
ELEMENTS = (FLOAT, HALF, INT16, INT8_TYPE)


def has_half() -> bool:
    """Whether this machine converts between float16 and float32 by itself."""
    return has("f16c") or platform.machine() in ("aarch64", "arm64")


def _like(value, element):
    """The type of as many elements as `value` has: a vector's or one."""
    kind = value.type
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _constant(value, number):
    kind = value.type
    is_vector = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [number] * kind.count if is_vector else number)


def load(builder, kind, address, lanes):
    """`lanes` numbers at a byte address as a vector of float32; `lanes` 0: one float32."""
    element = ELEMENTS[kind]
    whole = ir.VectorType(element, lanes) if lanes else element
    raw = builder.load(builder.inttoptr(address, whole.as_pointer()), align=ITEM_BYTES[kind])
    if kind == FLOAT16:
        return builder.fpext(raw, _like(raw, FLOAT))
    if kind == BFLOAT16:
        wide = builder.zext(raw, _like(raw, INT32))
        return builder.bitcast(builder.shl(wide, _constant(wide, 16)), _like(raw, FLOAT))
    if kind == INT8:
        return builder.sitofp(builder.sext(raw, _like(raw, INT32)), _like(raw, FLOAT))
    return raw


def _to_half(builder, value):
    """Nearest, at most `MOST_HALF`: what is finite stays so."""
    for sign, beyond, within in ((1, ">", "<"), (-1, "<", ">")):
        most, infinite = (_constant(value, sign * one) for one in (MOST_HALF, float("inf")))
        is_beyond = builder.and_(
            builder.fcmp_ordered(beyond, value, most), builder.fcmp_ordered(within, value, infinite)
        )
        value = builder.select(is_beyond, most, value)
    return builder.fptrunc(value, HALF)


def _to_bfloat(builder, value):
    """Nearest, ties to even; what is no number stays none."""
    raw = builder.bitcast(value, INT32)
    last = builder.and_(builder.lshr(raw, ir.Constant(INT32, 16)), ir.Constant(INT32, 1))
    rounded = builder.add(builder.add(raw, ir.Constant(INT32, 0x7FFF)), last)
    quiet = builder.or_(raw, ir.Constant(INT32, 0x400000))
    is_none = builder.fcmp_unordered("uno", value, value)
    chosen = builder.select(is_none, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, ir.Constant(INT32, 16)), INT16)


def _to_int8(builder, value):
    """Of a whole number in range; what is no number becomes 0."""
    is_none = builder.fcmp_unordered("uno", value, value)
    known = builder.select(is_none, ir.Constant(FLOAT, 0.0), value)
    return builder.fptosi(known, INT8_TYPE)


_STORED = {FLOAT16: _to_half, BFLOAT16: _to_bfloat, INT8: _to_int8}


@intrinsic(prefer_literal=True)
def load_one(typing, kind, address):
    """The number at an address as float32."""

    def build(context, builder, signature, args):
        return load(builder, signature.args[0].literal_value, args[1], 0)

    return types.float32(kind, types.int64), build


@intrinsic(prefer_literal=True)
def store_one(typing, kind, address, value):
    """Write a float32 at an address, rounded to the kind."""

    def build(context, builder, signature, args):
        chosen = signature.args[0].literal_value
        number = _STORED[chosen](builder, args[2]) if chosen in _STORED else args[2]
        place = builder.inttoptr(args[1], ELEMENTS[chosen].as_pointer())
        builder.store(number, place, align=ITEM_BYTES[chosen])
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.float32), build


NAMES = ("float32", "float16", "bfloat16", "int8")


def kind_of(dtype: torch.dtype) -> int:
    """The kind of a tensor's numbers."""
    return NAMES.index(str(dtype).removeprefix("torch."))
