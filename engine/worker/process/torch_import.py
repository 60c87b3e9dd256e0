"""What a worker leaves out when it imports torch and numba."""

import sys
from pathlib import Path
from types import ModuleType

META_REGISTRATIONS = "torch._meta_registrations"
SCIPY = "scipy"
NVIDIA = Path("/dev/nvidiactl")  # exists where a process may use an NVIDIA GPU


def skip_meta_registrations() -> None:
    """Import torch without its operators on tensors that have no contents.

    Only tracing and compiling a model use them, which a worker does at most on a GPU. They take a
    quarter of the import.
    """
    if not NVIDIA.exists():
        sys.modules.setdefault(META_REGISTRATIONS, ModuleType(META_REGISTRATIONS))


def skip_scipy() -> None:
    """Import numba without SciPy, if that is installed.

    Numba imports it for kernels that call BLAS, of which there are none. It takes a tenth of a
    worker's CPU seconds until it has loaded the built-in model, and 10 MiB.
    """
    if not NVIDIA.exists():
        sys.modules.setdefault(SCIPY, None)  # type: ignore[arg-type]  # importing it fails
