"""Looks up what 4-bit codes stand for, in all lanes of a vector at once."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from llvmlite import ir

from engine.worker.cpu.features import has
from engine.worker.cpu.kernels.vectors import INT32S, LANES, call

BYTES = 4 * LANES  # bytes of a vector
TABLE = 16  # entries
BYTE = ir.IntType(8)
INT8S = ir.VectorType(BYTE, BYTES)
# Looks up each byte in the 16 bytes at its place; gives 0 for a byte whose highest bit is set.
if LANES == 16 and has("avx512bw"):
    SHUFFLE = "llvm.x86.avx512.pshuf.b.512"
elif LANES == 8 and has("avx2"):
    SHUFFLE = "llvm.x86.avx2.pshuf.b"
else:
    SHUFFLE = ""


def look_up(builder, table, codes, field):
    """`table[code]` for each field of `field` bits of int32 lanes; codes are less than 16."""
    if not SHUFFLE:
        return _select(builder, table, codes, field)
    unused = sum(0x80 << at for at in range(0, 32, 8) if at % field)
    codes = builder.or_(codes, _all(unused)) if unused else codes
    entries = ir.Constant(INT8S, [ir.Constant(BYTE, entry) for entry in table * (BYTES // TABLE)])
    found = call(builder, SHUFFLE, INT8S, entries, builder.bitcast(codes, INT8S))
    return builder.bitcast(found, INT32S)


def _select(builder, table, codes, field):
    """The same without an instruction for it."""
    kind = ir.VectorType(ir.IntType(field), BYTES * 8 // field)
    fields = builder.bitcast(codes, kind)
    found = ir.Constant(kind, [0] * kind.count)
    for code, entry in enumerate(table):
        is_it = builder.icmp_unsigned("==", fields, ir.Constant(kind, [code] * kind.count))
        found = builder.select(is_it, ir.Constant(kind, [entry] * kind.count), found)
    return builder.bitcast(found, INT32S)


def _all(number):
    """An int32 in all lanes."""
    signed = number - (1 << 32) if number >> 31 else number
    return ir.Constant(INT32S, [signed] * LANES)
