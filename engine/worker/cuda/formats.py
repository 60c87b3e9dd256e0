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
        if preferred.format is not None:
            return STORED if preferred.stored == (preferred.format,) else preferred.format
    if asked in ("auto", own):
        return own
    if asked not in LINEARS:
        known = ", ".join((own, *LINEARS))
        raise StartupError(
            f"--weights {asked!r} is not supported on cuda with dtype {own}; known: {known}"
        )
    if asked == "fp8" and gpu.capability < FP8_BY_ROW:
        major, minor = gpu.capability
        raise StartupError(
            f"--weights 'fp8' needs a GPU of compute capability 9.0 (Hopper) or later, and "
            f"{gpu.model} has {major}.{minor}; int8 runs there"
        )
    if asked == "fp8" and dtype is not torch.bfloat16:
        raise StartupError(f"--weights 'fp8' needs --dtype bfloat16, not {own}")
    return asked


def reported(format: str, dtype: torch.dtype, preferred: PreferredFormat | None) -> str:
    """The format of linears as reports show it: of stored ones "q4_k+int8"."""
    if format != STORED or preferred is None:
        return format
    others = preferred.format or name_of(dtype)
    known = {each if each in FORMATS_IN_4_BITS else others for each in preferred.stored}
    return "+".join(sorted(known, key=lambda name: (name not in FORMATS_IN_4_BITS, name)))


def kv_format(asked: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache: that of the model, or 8-bit floats (fp8 e4m3)."""
    own = name_of(dtype)
    return choose_dtype("--kv-cache-dtype", asked, {"auto": dtype, own: dtype, "fp8": FP8}, "cuda")
