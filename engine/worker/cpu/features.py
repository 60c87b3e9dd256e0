"""What the instructions of kernels are chosen by: the CPU's features, under LLVM's names.

Numba compiles for another CPU where `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` say so, and
instructions are chosen for the same one.
"""

# mypy: disable-error-code="import-untyped"
import llvmlite.binding
from numba.core import config


def has(feature: str) -> bool:
    """Whether kernels may use, say, `avx2`."""
    told = config.CPU_FEATURES
    if told is not None:
        return f"+{feature}" in str(told).split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))
