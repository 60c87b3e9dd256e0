"""Quantizes the inputs of linears whose weights are in groups, a group at a time in vectors."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import INT32, int64
from engine.worker.cpu.kernels.vectors import FLOATS, INT32S, LANES, broadcast, call, pointer


def _make_quantize_group(item_bytes):
    """An intrinsic `quantize_group(x, y, count, factor) -> sum of y`.

    x and y are byte addresses of `count` float32, a multiple of `LANES`, and of as many integers
    of `item_bytes`. Each is `x * factor` rounded to the nearest integer, halves away from 0.
    """
    integers = ir.VectorType(ir.IntType(8 * item_bytes), LANES)

    def build(context, builder, signature, args):
        x, y, count, factor = args
        factor = broadcast(builder, factor)
        total = cgutils.alloca_once_value(builder, ir.Constant(INT32S, [0] * LANES))
        half = ir.Constant(FLOATS, [0.5] * LANES)
        with cgutils.for_range_slice(builder, int64(0), count, int64(LANES)) as (k, _):
            at = builder.add(x, builder.mul(k, int64(4)))
            number = builder.load(pointer(builder, at, FLOATS), align=4)
            away = call(builder, f"llvm.copysign.v{LANES}f32", FLOATS, half, number)
            value = builder.fadd(builder.fmul(number, factor), away)
            value = builder.fptosi(value, INT32S)
            target = builder.add(y, builder.mul(k, int64(item_bytes)))
            short = builder.trunc(value, integers)
            builder.store(short, pointer(builder, target, integers), align=item_bytes)
            builder.store(builder.add(builder.load(total), value), total)
        return call(builder, f"llvm.vector.reduce.add.v{LANES}i32", INT32, builder.load(total))

    def quantize_group(typing, x, y, count, factor):
        arguments = types.int64, types.int64, types.int64, types.float32
        return types.int32(*arguments), build

    return intrinsic(quantize_group)


quantize_group_to_int8 = _make_quantize_group(1)
quantize_group_to_int16 = _make_quantize_group(2)
