"""The CPU's features by LLVM's names, from which kernels choose their instructions.

Numba compiles for another CPU if `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` are set; instructions
are then chosen for that CPU.
"""

# mypy: disable-error-code="import-untyped"
import ctypes
import platform
import sys
from functools import cache

from engine.worker.cpu import no_compiler

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # numbers of Linux on x86-64


def _find() -> frozenset[str]:
    """The features that the compiler may use. For Intel's CPUs LLVM makes vectors of 256 bits of
    loops, although there are wider ones, unless it is told not to."""
    if no_compiler.compiler is not None:
        return no_compiler.compiler.files.features() or frozenset()
    import llvmlite.binding
    from numba.core import config

    if config.CPU_FEATURES is None and platform.machine() in ("x86_64", "AMD64"):
        host = llvmlite.binding.get_host_cpu_features().flatten()
        config.CPU_FEATURES = f"{host},-prefer-256-bit"
    if config.CPU_FEATURES is not None:
        names = str(config.CPU_FEATURES).split(",")
        return frozenset(name[1:] for name in names if name.startswith("+"))
    of_host = llvmlite.binding.get_host_cpu_features()
    return frozenset(name for name, is_there in of_host.items() if is_there)


FEATURES = _find()


def has(feature: str) -> bool:
    """Whether kernels may use a feature, for example `avx2`."""
    return feature in FEATURES


@cache
def has_amx() -> bool:
    """Whether kernels may use AMX with int8 and bfloat16, beside vectors of 512 bits.

    Linux lends a process the tile registers when it asks for them (Documentation/arch/x86/xstate).
    """
    if not all(has(feature) for feature in ("avx512f", "amx-tile", "amx-int8", "amx-bf16")):
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    asked: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return asked == 0
