"""The CPU's features by LLVM's names, from which kernels choose their instructions.

Numba compiles for another CPU if `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` are set; instructions
are then chosen for that CPU.
"""

# mypy: disable-error-code="import-untyped"
import llvmlite.binding
from numba.core import config


def has(feature: str) -> bool:
    """Whether kernels may use a feature, for example `avx2`."""
    configured = config.CPU_FEATURES
    if configured is not None:
        return f"+{feature}" in str(configured).split(",")
    return bool(llvmlite.binding.get_host_cpu_features().get(feature, False))
