"""Compiles kernels once per machine: to functions, or to addresses that `call_kernel` takes.

Numba keeps the machine code beside the source or, where that cannot be written, in the user's
cache directory; where neither can, each process compiles anew. `python -m engine.worker.cpu`
compiles all ahead of a first start.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from numba import cfunc, njit, types

KERNEL = types.void(types.int64, types.int64, types.int64)

# For leaf functions only: what they call inherits it, and tiles must add in their own order.
# Without nnan, so that what is no number stays none.
FAST = {"reassoc", "contract", "nsz", "arcp"}


@cache
def _digest() -> str:
    """Of all sources in this package: inlined code must not outlive its source."""
    hashed = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:12]


def _stamp(function: Callable[..., Any]) -> None:
    """Make Numba's file name for a function change with the source it is made of."""
    digest = _digest()
    if not function.__qualname__.endswith(digest):
        function.__qualname__ += f"_{digest}"


def _cached(make: Callable[..., Any], function: Callable[..., Any]) -> Any:
    _stamp(function)
    try:
        return make(cache=True)(function)
    except (RuntimeError, OSError):  # no cache directory, or none that can be written
        return make(cache=False)(function)


def compiled(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """A function of int64s as machine code that runs without the interpreter's lock."""

    def make(cache: bool) -> Any:
        return njit(signature, nogil=True, error_model="numpy", cache=cache)

    made: Callable[..., Any] = _cached(make, function)
    return made


@cache
def kernel(function: Callable[..., Any]) -> Any:
    """`void function(int64 operands, int64 chunk, int64 thread)`, its address in `.address`.

    Kept for the life of the process, since others hold the address.
    """

    def make(cache: bool) -> Any:
        return cfunc(KERNEL, nogil=True, error_model="numpy", cache=cache)

    return _cached(make, function)


def compile_all(
    functions: Sequence[Callable[..., None]], progress: Callable[[str, int, int], None]
) -> None:
    """Compile these kernels: seconds on a machine that never ran this version, else no time."""
    for done, function in enumerate(functions, 1):
        kernel(function)
        progress("kernels", done, len(functions))
