"""FlashInfer's kernels for what lies between the linears; 16-bit numbers only.

The package is imported when the first of them is made: the import reads its settings from the
environment, which `prepare_environment` fills.
"""

import importlib
import os
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from engine.errors import StartupError

VECTOR_BYTES = 16  # what a thread reads at once

# FlashInfer's names of gated activations, by Hugging Face's.
GATED = {
    "silu": "silu_and_mul",
    "swish": "silu_and_mul",
    "gelu": "gelu_and_mul",
    "gelu_new": "gelu_tanh_and_mul",
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
}


class Kernels(Protocol):
    """Norms and gated activations that read and write once."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """`[rows, hidden]`, or `[rows, heads, dim]` with rows that may lie apart; `out` may be
        `x`."""
        ...

    def gated(self, name: str) -> Callable[[Tensor, Tensor], None] | None:
        """`gate(x, out)`: from `[rows, 2 * width]` to `[rows, width]`; None if there is none."""
        ...


class FlashInferKernels:
    """See `Kernels`."""

    def __init__(self) -> None:
        """Raises `StartupError` with one line if FlashInfer cannot be imported."""
        try:
            package = importlib.import_module("flashinfer")
        except ImportError as error:
            raise StartupError(f"flashinfer cannot be imported: {error}") from error
        self._package = package
        self._norm = package.rmsnorm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self._norm(x, weight, eps, out=out)

    def gated(self, name: str) -> Callable[[Tensor, Tensor], None] | None:
        if name not in GATED:
            return None
        return cast("Callable[[Tensor, Tensor], None]", getattr(self._package, GATED[name]))


def fits(width: int, dtype: torch.dtype) -> bool:
    """Whether rows of this width can be read in whole vectors."""
    return width * dtype.itemsize % VECTOR_BYTES == 0


def prepare_environment(capability: tuple[int, int]) -> None:
    """What FlashInfer reads when it is imported; whatever the operator has set stays.

    The kind of GPU is named so that it need not be asked, nothing is fetched from a network, and
    norms are compiled from CUDA whatever else is installed.
    """
    major, minor = capability
    suffix = "a" if major >= 9 else ""
    wanted = {
        "FLASHINFER_CUDA_ARCH_LIST": f"{major}.{minor}{suffix}",
        "FLASHINFER_NO_DOWNLOAD": "1",
        "FLASHINFER_USE_CUDA_NORM": "1",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
