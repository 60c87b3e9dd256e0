"""The operands of kernels: structures that Python fills in and kernels read by field name.

Every field has 64 bits. On the Python side an operand block is a `ctypes.Structure`; in a kernel
`make_reader` turns its address into a named tuple of constants for the call.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
import ctypes
from collections import namedtuple
from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

T = TypeVar("T", bound=type[ctypes.Structure])

_CTYPES: dict[type, type[ctypes.c_int64] | type[ctypes.c_double]] = {
    int: ctypes.c_int64,
    float: ctypes.c_double,
}


def operands(structure: T) -> T:
    """Class decorator: each field annotated `int` becomes an int64, each `float` a float64.

    Addresses are ints. Fields that the constructor is not given are 0.
    """
    structure._fields_ = [(name, _CTYPES[kind]) for name, kind in structure.__annotations__.items()]
    return structure


def make_reader(structure: type[ctypes.Structure]) -> Callable[..., Any]:
    """A function for kernels: `read(address)` gives a named tuple of all fields of the structure
    there."""
    fields: list[Any] = list(structure._fields_)
    kinds = [types.float64 if kind is ctypes.c_double else types.int64 for _, kind in fields]
    named = namedtuple(structure.__name__, [name for name, _ in fields])  # type: ignore[misc]
    tuple_type = types.NamedTuple(kinds, named)

    def build(context, builder, signature, args):
        values = []
        for number, kind in enumerate(kinds):
            element = ir.DoubleType() if kind is types.float64 else ir.IntType(64)
            address = builder.add(args[0], ir.Constant(ir.IntType(64), 8 * number))
            values.append(builder.load(builder.inttoptr(address, element.as_pointer())))
        return context.make_tuple(builder, signature.return_type, values)

    def read(typing, address):
        return tuple_type(types.int64), build

    made: Callable[..., Any] = intrinsic(read)
    return made
