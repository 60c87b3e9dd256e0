"""Numba intrinsics over plain addresses: array views, atomics, calls through pointers.

Kernels take addresses as int64 instead of arrays, since each array type would compile anew.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

INT64 = ir.IntType(64)
INT32 = ir.IntType(32)
FLOAT = ir.FloatType()


def int64(value):
    """An int64 constant in LLVM IR."""
    return ir.Constant(INT64, value)


def _make_view(item, element, item_bytes):
    array_type = types.Array(item, 1, "C")

    def build(context, builder, signature, args):
        array = context.make_array(array_type)(context, builder)
        populate_array(
            array,
            data=builder.inttoptr(args[0], element.as_pointer()),
            shape=[args[1]],
            strides=[int64(item_bytes)],
            itemsize=int64(item_bytes),
            meminfo=None,
        )
        return array._getvalue()

    def view(typing, address, count):
        return array_type(types.int64, types.int64), build

    return intrinsic(view)


# `view(address, count)`: an array over memory that the caller keeps alive.
float32s = _make_view(types.float32, FLOAT, 4)
float64s = _make_view(types.float64, ir.DoubleType(), 8)
int64s = _make_view(types.int64, INT64, 8)
int32s = _make_view(types.int32, INT32, 4)
int16s = _make_view(types.int16, ir.IntType(16), 2)
int8s = _make_view(types.int8, ir.IntType(8), 1)


@intrinsic
def power_of_two(typing, exponent):
    """2 to an integral float32 in [-126, 127], built from its bits; loops over it vectorise."""

    def build(context, builder, signature, args):
        biased_ids = builder.add(builder.fptosi(args[0], INT32), ir.Constant(INT32, 127))
        return builder.bitcast(builder.shl(biased_ids, ir.Constant(INT32, 23)), FLOAT)

    return types.float32(types.float32), build


@intrinsic
def float_of_bits(typing, value):
    """The float32 that has the bits of an int32."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), build


@intrinsic
def fma_one(typing, a, b, c):
    """`a * b + c` of scalar floats, rounded once as in vector tiles."""

    def build(context, builder, signature, args):
        kind = ir.FunctionType(FLOAT, [FLOAT] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32")
        return builder.call(function, args)

    return types.float32(*[types.float32] * 3), build


@intrinsic
def load_acquire(typing, address):
    """Atomically load an int64 with acquire ordering."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), build


@intrinsic
def store_release(typing, address, value):
    """Atomically store an int64 with release ordering."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def compare_and_swap(typing, address, old, new):
    """Atomically replace `old` by `new`; returns whether the value was `old`."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), build


@intrinsic
def add_release(typing, address, value):
    """Atomically add to an int64."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        builder.atomic_rmw("add", pointer, args[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def call_kernel(typing, kernel, operands, chunk, thread):
    """Call `void kernel(int64 operands, int64 chunk, int64 thread)` at an address."""

    def build(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [INT64] * 3)
        pointer = builder.inttoptr(args[0], function.as_pointer())
        builder.call(pointer, args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), build
