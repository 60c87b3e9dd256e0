"""Compiles kernels once per machine: to functions, or to addresses for `call_kernel`.

Machine code is cached beside the source or, if that directory is not writable, in the user's cache
directory; if neither is writable, every process compiles anew. `python -m engine.worker.cpu`
compiles all kernels before a first start.
"""

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types

from engine.worker.cpu import no_compiler
from engine.worker.cpu.features import has_amx

KERNEL = types.void(types.int64, types.int64, types.int64)

# Functions that kernels call. They are compiled into each kernel: a function of its own would be
# optimized again in every library that calls it, and which of these copies a kernel calls would
# depend on the libraries loaded before it. So kernels that are compiled now had other bits than
# kernels that are loaded from the cache.
leaf = njit(forceinline=True)
# With fast-math flags, which functions that they call inherit: tiles must add in a fixed order.
# Without `nnan`, so that NaN in gives NaN out.
fast_leaf = njit(forceinline=True, fastmath={"reassoc", "contract", "nsz", "arcp"})


@cache
def _digest() -> str:
    """A digest of all sources in this package: cached code contains inlined code of other modules.

    Numba looks at the CPU itself, but not at whether Linux lends its tile registers.
    """
    hashed = hashlib.sha256(b"AMX" if has_amx() else b"")
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def _stamp(function: Callable[..., Any]) -> None:
    """Add the source digest to the function's name, of which Numba makes the cache file's name."""
    digest = _digest()
    if not function.__qualname__.endswith(digest):
        function.__qualname__ += f"_{digest}"


def unstamped(name: str) -> str:
    """The name of a function from that of its kernel. Raises `RuntimeError` if the kernel is to be
    made of other sources than those of this process."""
    plain, _, digest = name.rpartition("_")
    if digest != _digest():
        raise RuntimeError(f"the compiler imports another copy of the engine: {__file__}")
    return plain


def _cached(make: Callable[..., Any], function: Callable[..., Any]) -> Any:
    try:
        return make(cache=True)(function)
    except (RuntimeError, OSError):  # there is no writable cache directory
        return make(cache=False)(function)


def compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """A function of int64 arguments as machine code that releases the GIL while it runs.

    From an object file it returns nothing.
    """
    _stamp(function)
    if no_compiler.compiler is not None:
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * function.__code__.co_argcount)
        return kind(kernel(function).address)

    def make(cache: bool) -> Any:
        return njit(signature, nogil=True, error_model="numpy", cache=cache)

    made: Callable[..., Any] = _cached(make, function)
    return made


_kernels: dict[Callable[..., Any], Any] = {}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile to `void function(int64 operands, int64 chunk, int64 thread)`, address in `.address`.

    Kept for the life of the process, because callers keep the address. Threads that compile a
    function at once get the same kernel.
    """
    made = _kernels.get(function)
    return _kernels.setdefault(function, _kernel(function)) if made is None else made


def _kernel(function: Callable[..., Any]) -> Any:
    if no_compiler.compiler is not None:
        return no_compiler.compiler.compile(_name(function))

    def make(cache: bool) -> Any:
        return cfunc(KERNEL, nogil=True, error_model="numpy", cache=cache)

    _stamp(function)
    return _cached(make, function)


def object_of(function: Callable[..., Any]) -> bytes:
    """The object file of a kernel, or of another function of int64 arguments.

    It is compiled here: of a kernel from its cache Numba keeps no object.
    """
    signature = types.void(*[types.int64] * function.__code__.co_argcount)
    made: Any = cfunc(signature, nogil=True, error_model="numpy")(function)
    data: bytes = made._library._get_compiled_object()
    return data


def _name(function: Callable[..., Any]) -> str:
    _stamp(function)
    return f"{function.__module__}:{function.__qualname__}"


def request(functions: Sequence[Callable[..., None]]) -> None:
    """Begin to compile these in this order, if another process compiles."""
    if no_compiler.compiler is not None:
        no_compiler.compiler.request([_name(each) for each in functions])


def compile_all(
    functions: Sequence[Callable[..., None]],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> None:
    """Compile these kernels; takes seconds on the first start of a version, then milliseconds."""
    request(functions)
    progress("kernels", 0, len(functions))
    for done, function in enumerate(functions, 1):
        kernel(function)
        progress("kernels", done, len(functions))
