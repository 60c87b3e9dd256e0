"""Checks of formats that this machine's device cannot compute in, without asking torch."""

import ctypes

from engine.errors import StartupError
from gateway.settings.settings import Settings

DRIVER = "libcuda.so.1"
# What a CPU computes in, by setting; a test holds the table to the device.
ON_CPU = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "weights": ("auto", "float32", "int8", "int4"),
    "kv_cache_dtype": ("auto", "float32", "float16", "bfloat16", "int8"),
}


def check_device(settings: Settings) -> None:
    """Raise `StartupError` if the device is not there, or a format is not one of a CPU's."""
    kernels = settings.kernels
    if settings.launch.launcher != "local":
        return  # the workers run on other machines
    if kernels.device.startswith("cuda") and not has_driver():
        raise StartupError(
            f"--device {kernels.device!r} cannot be used: there is no NVIDIA driver: {DRIVER} "
            "cannot be loaded"
        )
    if kernels.device != "cpu" and has_driver():
        return
    given = {
        "dtype": kernels.dtype,
        "weights": kernels.weights,
        "kv_cache_dtype": settings.kv.kv_cache_dtype,
    }
    for name, value in given.items():
        if value not in ON_CPU[name]:
            known = ", ".join(ON_CPU[name])
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag} {value!r} is not supported on cpu; known: {known}")
    if kernels.batch_invariant:
        raise StartupError("--batch-invariant is not supported on cpu, only on cuda")


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
