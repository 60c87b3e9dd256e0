"""The formats of weights and of the KV cache that a GPU computes with."""

import torch

from engine.errors import StartupError
from engine.worker.cuda.gpu import Gpu
from engine.worker.cuda.kernels.reference import FP8
from engine.worker.cuda.model.four_bit import FORMATS_IN_4_BITS
from engine.worker.cuda.model.operators import LINEARS, STORED
from engine.worker.device import choose_dtype
from engine.worker.ports import PreferredFormat, name_of

FP8_BY_ROW = (9, 0)  # the first compute capability with one scale per row


def weight_format(
    asked: str, dtype: torch.dtype, gpu: Gpu, preferred: PreferredFormat | None = None
) -> str:
    """The weight format of linear layers; raises `StartupError` if this GPU cannot compute it."""
    own = name_of(dtype)
    if asked == "auto" and preferred is not None:
        if not FORMATS_IN_4_BITS.isdisjoint(preferred.stored):
            return STORED
        computed = {*LINEARS} if dtype is not torch.float32 else {"int8"}
        if preferred.stored and computed >= {*preferred.stored}:
            return STORED
        asked = preferred.format or own
    if asked in ("auto", own):
        return own
    if asked not in LINEARS:
        known = ", ".join((own, *LINEARS))
        raise StartupError(
            f"--weights {asked!r} is not supported on cuda with dtype {own}; known: {known}"
        )
    if asked == "fp8" and (reason := why_not_fp8(gpu, dtype)):
        raise StartupError(f"--weights 'fp8' needs {reason}")
    return asked


def reported(format: str, dtype: torch.dtype, preferred: PreferredFormat | None) -> str:
    """The format of linears as reports show it: of stored ones "q4_k+int8"."""
    if format != STORED or preferred is None:
        return format
    others = preferred.format or name_of(dtype)
    as_stored = FORMATS_IN_4_BITS | LINEARS.keys()
    known = {each if each in as_stored else others for each in preferred.stored}
    return "+".join(sorted(known, key=lambda name: (name not in FORMATS_IN_4_BITS, name)))


def why_not_fp8(gpu: Gpu, dtype: torch.dtype) -> str:
    """What products of weights and activations in fp8 need and lack; empty if nothing."""
    if gpu.capability < FP8_BY_ROW:
        major, minor = gpu.capability
        return (
            f"a GPU of compute capability 9.0 (Hopper) or later, and {gpu.model} has "
            f"{major}.{minor}; int8 runs there"
        )
    return "" if dtype is torch.bfloat16 else f"--dtype bfloat16, not {name_of(dtype)}"


def kv_format(asked: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache: that of the model, or 8-bit floats (fp8 e4m3)."""
    own = name_of(dtype)
    return choose_dtype("--kv-cache-dtype", asked, {"auto": dtype, own: dtype, "fp8": FP8}, "cuda")
