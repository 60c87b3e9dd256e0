"""Norm and gated-activation kernels of FlashInfer; 16-bit dtypes only.

FlashInfer is imported when `FlashInferKernels` is made, after
`build_environment.prepare_environment` has set the variables that FlashInfer reads at import.
"""

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from engine.errors import StartupError

VECTOR_BYTES = 16  # one vectorised load of a thread

# FlashInfer's names of gated activations, by Hugging Face's.
GATED = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
}


class Kernels(Protocol):
    """Fused norms and gated activations."""

    @property
    def has_norm(self) -> bool:
        """Whether `rms_norm` can be compiled here."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Write the norm into `out`, which may be `x`; `[rows, hidden]`, or `[rows, heads, dim]`
        with strided rows."""

    def gated(self, name: str) -> Callable[[Tensor, Tensor], None] | None:
        """`gate(x, out)` from `[rows, 2 * width]` to `[rows, width]`; None if there is no
        kernel."""


class FlashInferKernels:
    """Kernels of the installed FlashInfer."""

    def __init__(self, *, has_norm: bool = True) -> None:
        """Raises `StartupError` if FlashInfer cannot be imported."""
        try:
            package = importlib.import_module("flashinfer")
        except ImportError as error:
            raise StartupError(f"flashinfer cannot be imported: {error}") from error
        self.has_norm = has_norm
        self._package = package
        self._norm = package.rmsnorm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self._norm(x, weight, eps, out=out)

    def gated(self, name: str) -> Callable[[Tensor, Tensor], None] | None:
        if name not in GATED:
            return None
        return cast("Callable[[Tensor, Tensor], None]", getattr(self._package, GATED[name]))


def fits(width: int, dtype: torch.dtype) -> bool:
    """Whether rows of `width` elements are a whole number of vectorised loads."""
    return width * dtype.itemsize % VECTOR_BYTES == 0
