"""The formats of weights and of the KV cache that a CPU computes with."""

import torch

from engine.errors import StartupError
from engine.worker.cpu.kernels.dtypes import has_half
from engine.worker.cpu.linears import FORMATS
from engine.worker.device import choose_dtype
from engine.worker.model.kv.kv_tensors import CPU_KV_DTYPES
from engine.worker.ports import PreferredFormat
from engine.worker_settings import Kernels

DTYPES = ("auto", "float32", "float16", "bfloat16")
NO_HALF = "'float16' needs a CPU with F16C"
PLAIN_ATTENTION = "reference"  # with it, all operators are plain torch


def weight_formats(
    kernels: Kernels, preferred: PreferredFormat, *, is_plain: bool
) -> tuple[tuple[str, ...], str]:
    """The formats in which quantized weights stay as they are stored, and what all others are
    converted to. Raises `StartupError` if the settings name an unknown one.

    "auto" keeps weights of 16 bits as they are. Without kernels, if `is_plain`, all weights are
    float32.
    """
    weights, floats = kernels.weights, kernels.dtype
    if floats not in DTYPES:
        known = ", ".join(DTYPES[1:])
        raise StartupError(f"--dtype {floats!r} is not supported on cpu; known: {known}")
    if floats == "auto":
        floats = "float32" if is_plain else preferred.floats or "float32"
        floats = "float32" if floats == "float16" and not has_half() else floats
    if "float16" in (weights, floats) and not has_half():
        raise StartupError(f"--dtype {NO_HALF}")
    if weights not in ("auto", *FORMATS):
        known = ", ".join(("auto", *FORMATS))
        raise StartupError(f"--weights {weights!r} is not supported on cpu; known: {known}")
    if weights == "auto" and not is_plain:
        if preferred.stored:
            return preferred.stored, floats
        return (), preferred.format or floats
    weights = floats if weights == "auto" else weights
    if is_plain and weights != "float32":
        raise StartupError(f"weights in {weights} need another attention than {PLAIN_ATTENTION!r}")
    return (), weights


def kv_format(name: str, *, keeps_kv: bool = True) -> torch.dtype:
    """The dtype of the KV cache by its name; raises `StartupError` if it is not supported.

    "auto" is float16, whatever the dtype of weights, if the CPU converts it in hardware; without
    `keeps_kv`, in an encoder, it is float32.
    """
    if name == "auto":
        return torch.float16 if keeps_kv and has_half() else torch.float32
    dtype = choose_dtype("--kv-cache-dtype", name, CPU_KV_DTYPES, "cpu")
    if dtype is torch.float16 and not has_half():
        raise StartupError(f"--kv-cache-dtype {NO_HALF}")
    return dtype
