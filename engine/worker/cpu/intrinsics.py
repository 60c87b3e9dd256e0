"""Numba intrinsics over plain addresses: views, atomics, calls through pointers.

Kernels get addresses as int64, since arrays of many types would each compile anew.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

INT64 = ir.IntType(64)
INT32 = ir.IntType(32)
FLOAT = ir.FloatType()


def word(value):
    """An int64 constant in LLVM IR."""
    return ir.Constant(INT64, value)


def _make_view(kind, element, item_bytes):
    array_kind = types.Array(kind, 1, "C")

    def build(context, builder, signature, args):
        array = context.make_array(array_kind)(context, builder)
        populate_array(
            array,
            data=builder.inttoptr(args[0], element.as_pointer()),
            shape=[args[1]],
            strides=[word(item_bytes)],
            itemsize=word(item_bytes),
            meminfo=None,
        )
        return array._getvalue()

    def view(typing, address, count):
        return array_kind(types.int64, types.int64), build

    return intrinsic(view)


# `view(address, count)`: an array over memory that someone else keeps alive.
floats = _make_view(types.float32, FLOAT, 4)
doubles = _make_view(types.float64, ir.DoubleType(), 8)
words = _make_view(types.int64, INT64, 8)
bits = _make_view(types.int32, INT32, 4)
shorts = _make_view(types.int16, ir.IntType(16), 2)
octets = _make_view(types.int8, ir.IntType(8), 1)


@intrinsic
def power_of_two(typing, exponent):
    """2 to a whole float32 in [-126, 127], through its bits; loops over it vectorise."""

    def build(context, builder, signature, args):
        biased = builder.add(builder.fptosi(args[0], INT32), ir.Constant(INT32, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(INT32, 23)), FLOAT)

    return types.float32(types.float32), build


@intrinsic
def float_of_bits(typing, value):
    """The float32 that an int32 is the bits of."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), build


@intrinsic
def load_acquire(typing, address):
    """The int64 at an address, and all that was written before it."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), build


@intrinsic
def store_release(typing, address, value):
    """Write an int64 so that who sees it sees all that was written before."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def compare_and_swap(typing, address, old, new):
    """Write `new` if `old` is still there; whether it was."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), build


@intrinsic
def add_release(typing, address, value):
    """Atomically add to the int64 at an address."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        builder.atomic_rmw("add", pointer, args[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def call_kernel(typing, kernel, operands, chunk, thread):
    """Call `void kernel(int64 operands, int64 chunk, int64 thread)` by its address."""

    def build(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [INT64] * 3)
        pointer = builder.inttoptr(args[0], function.as_pointer())
        builder.call(pointer, args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), build
