"""Vector registers in LLVM IR: their width on this CPU, and the operations that all tiles use."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from llvmlite import ir
from numba.core import cgutils

from engine.worker.cpu.features import has
from engine.worker.cpu.intrinsics import FLOAT, INT32

LANES = 16 if has("avx512f") else 8  # of 32 bits
LINE = 64  # bytes of a cache line

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
