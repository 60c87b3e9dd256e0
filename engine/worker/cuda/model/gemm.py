"""8-bit GEMMs by torch; sizes must be multiples of what the tensor cores take."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
FP8_CAPABILITY = (8, 9)  # Ada, the first compute capability with fp8 tensor cores
FP8_BY_ROW = (9, 0)  # the first with one scale per row
INT8_ROWS = 17  # torch._int_mm takes no fewer rows
INT8_ALIGNMENT = 8  # of both dimensions of a weight
FP8_ALIGNMENT = 16


class Gemm8Bit(Protocol):
    """8-bit matrix products; weights are `[out, in]`, row-major."""

    def int8(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight.T` in int32; `x` int8 `[rows, in]` with at least `INT8_ROWS` rows."""
        ...

    def fp8(
        self, x: Tensor, weight: Tensor, scales: Tensor, weight_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """`(x * scales) @ (weight * weight_scales).T`; scales are `[rows, 1]` and `[out, 1]`."""
        ...


def torch_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T` by torch in any format of linears, with scales of 1: for measurements."""
    gemm = TorchGemm8Bit()
    if x.dtype == torch.int8:
        rows = F.pad(x, (0, 0, 0, max(0, INT8_ROWS - len(x))))
        return gemm.int8(rows, weight)[: len(x)].to(dtype)
    if x.dtype == FP8:
        ones = [torch.ones((len(each), 1), device=x.device) for each in (x, weight)]
        return gemm.fp8(x, weight, ones[0], ones[1], dtype)
    return F.linear(x, weight)


@contextmanager
def by_cublaslt() -> Iterator[None]:
    """Inside, torch computes 16-bit products by cuBLASLt. A CUDA graph keeps the choice."""
    before = torch.backends.cuda.preferred_blas_library()
    try:
        with warnings.catch_warnings():  # torch calls the choice experimental
            warnings.simplefilter("ignore")
            torch.backends.cuda.preferred_blas_library("cublaslt")
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class TorchGemm8Bit:
    """8-bit products by torch."""

    def int8(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch._int_mm(x, weight.t())

    def fp8(
        self, x: Tensor, weight: Tensor, scales: Tensor, weight_scales: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return torch._scaled_mm(
            x, weight.t(), scale_a=scales, scale_b=weight_scales.t(), out_dtype=dtype
        )
