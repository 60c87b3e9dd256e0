"""Vector registers in LLVM IR: their width on this CPU, and the operations that all tiles use."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.features import has
from engine.worker.cpu.intrinsics import FLOAT, INT32, int64

LANES = 16 if has("avx512f") else 8  # lanes of 32 bits
LINE = 64  # bytes of a cache line
PREFETCHED_AT_ONCE = 16 * LINE

_KNOWN = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
INSTRUCTIONS = next((_KNOWN[name] for name in _KNOWN if has(name)), "no vectors")

FLOATS = ir.VectorType(FLOAT, LANES)
INT32S = ir.VectorType(INT32, LANES)
BYTE_POINTER = ir.IntType(8).as_pointer()


def pointer(builder, address, element):
    """An int64 address as a pointer to `element`."""
    return builder.inttoptr(address, element.as_pointer())


def call(builder, name, result, *args):
    """Call an LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fma(builder, a, b, c):
    """`a * b + c` of float vectors, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)


def broadcast(builder, value):
    """A float or int32 in all lanes of a vector."""
    vector = ir.VectorType(value.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INT32S, [0] * LANES))


def prefetch(builder, address):
    """Prefetch the cache line at an address into L1; never faults."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE_POINTER, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data = (ir.Constant(INT32, value) for value in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, BYTE_POINTER), read, locality, data])


@intrinsic
def largest_of(typing, address, count):
    """The largest of `count` floats at an address; NaN is ignored.

    LLVM finds no vectors for this loop by itself.
    """

    def larger(builder, a, b):
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def build(context, builder, signature, args):
        address, count = args
        least = float("-inf")
        lanes = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [least] * LANES))
        end = builder.mul(builder.and_(count, int64(-LANES)), int64(4))
        with cgutils.for_range_slice(builder, int64(0), end, int64(4 * LANES)) as (at, _):
            found = builder.load(pointer(builder, builder.add(address, at), FLOATS), align=4)
            builder.store(larger(builder, found, builder.load(lanes)), lanes)
        top = cgutils.alloca_once_value(builder, ir.Constant(FLOAT, least))
        for lane in range(LANES):
            one = builder.extract_element(builder.load(lanes), ir.Constant(INT32, lane))
            builder.store(larger(builder, one, builder.load(top)), top)
        stop = builder.mul(count, int64(4))
        with cgutils.for_range_slice(builder, end, stop, int64(4)) as (at, _):
            one = builder.load(pointer(builder, builder.add(address, at), FLOAT), align=4)
            builder.store(larger(builder, one, builder.load(top)), top)
        return builder.load(top)

    return types.float32(types.int64, types.int64), build


def make_prefetch(num_bytes):
    """An intrinsic `prefetch(address)` of so many bytes; never faults."""

    def build(context, builder, signature, args):
        for line in range(0, num_bytes, LINE):
            prefetch(builder, builder.add(args[0], int64(line)))
        return context.get_dummy_value()

    def prefetch_bytes(typing, address):
        return types.void(types.int64), build

    return intrinsic(prefetch_bytes)


prefetch_lines = make_prefetch(PREFETCHED_AT_ONCE)
