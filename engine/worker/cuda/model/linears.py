"""Linear layers on a GPU, in the formats of their weights.

With 8 bits each output channel of the weight has a scale, and each token of the input gets one when
it comes. Sums are int32 or float32; the scales are applied to them, then they are rounded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.cuda.model.gemm import (
    FP8,
    FP8_ALIGNMENT,
    FP8_MOST,
    INT8_ALIGNMENT,
    INT8_ROWS,
    Products,
)
from engine.worker.ports import Linear
from engine.worker.weights.int8_weight import MOST, Int8Weight, Weight

ROWS_AT_ONCE = 4096  # output channels that are rounded or expanded together


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """The weight in the dtype of the activations."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """See `Linear`. The sum is made in float32, with what it is added to, and rounded once."""
        if add_to is None:
            return F.linear(x, self.weight, self.bias)
        add_to.addmm_(x, self.weight.t())
        return add_to if self.bias is None else add_to.add_(self.bias)


@dataclass(frozen=True, slots=True)
class CudaInt8Linear:
    """Weight and activations in 8-bit integers."""

    weight: Int8Weight
    bias: Tensor | None
    products: Products

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        steps, scales = rounded_rows(x, MOST)
        values = steps.round_().to(torch.int8)
        if len(x) < INT8_ROWS:
            values = F.pad(values, (0, 0, 0, INT8_ROWS - len(x)))
        sums = self.products.int8(values, self.weight.values)[: len(x)]
        return finish(sums.float().mul_(scales).mul_(self.weight.scales), self.bias, x, add_to)


@dataclass(frozen=True, slots=True)
class CudaFp8Linear:
    """Weight and activations in 8-bit floats (e4m3)."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, 1]
    bias: Tensor | None
    products: Products

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        steps, scales = rounded_rows(x, FP8_MOST)
        y = self.products.fp8(steps.to(FP8), self.values, scales, self.scales, x.dtype)
        if self.bias is not None:
            y += self.bias
        return y if add_to is None else add_to.add_(y)


def rounded_rows(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Rows in float32, each divided by its scale so that none exceeds `most`, and the scales.

    `[rows, width]` and `[rows, 1]`; a row of zeros has scale 1.
    """
    values = x.float()
    largest = values.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / most, 1.0)
    return (values / scales).clamp_(-most, most), scales


def finish(sums: Tensor, bias: Tensor | None, x: Tensor, add_to: Tensor | None) -> Tensor:
    """Float32 sums with bias, as the dtype of `x`, or added to what is there."""
    if bias is not None:
        sums += bias
    return sums.to(x.dtype) if add_to is None else add_to.add_(sums)


def stacked(weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
    """One matrix below the other, in the dtype; what is rounded is expanded."""
    parts = [_expand(weight, dtype) for weight in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def int8_linear(
    weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, products: Products
) -> Linear:
    """In 8-bit integers, or expanded where the tensor cores do not take the size."""
    rounded = [_round_int8(weight) for weight in weights]
    width, height = rounded[0].shape[1], sum(len(each.scales) for each in rounded)
    if width % INT8_ALIGNMENT or height % INT8_ALIGNMENT:
        return FloatLinear(stacked(rounded, dtype), bias)
    whole = Int8Weight(
        torch.cat([each.values for each in rounded]), torch.cat([each.scales for each in rounded])
    )
    return CudaInt8Linear(whole, bias, products)


def fp8_linear(
    weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, products: Products
) -> Linear:
    """In 8-bit floats, or expanded where the tensor cores do not take the size."""
    rounded = [_round_fp8(weight) for weight in weights]
    values, scales = (torch.cat(parts) for parts in zip(*rounded, strict=True))
    if any(size % FP8_ALIGNMENT for size in values.shape):
        return FloatLinear((values.float() * scales).to(dtype), bias)
    return CudaFp8Linear(values, scales, bias, products)


def _expand(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Slice by slice, so that no whole matrix is there in float32."""
    if not isinstance(weight, Int8Weight):
        return weight
    found = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    for at in range(0, len(found), ROWS_AT_ONCE):
        found[at : at + ROWS_AT_ONCE] = weight.cut(
            slice(at, at + ROWS_AT_ONCE), slice(None)
        ).dequantize()
    return found


def _round_int8(weight: Weight) -> Int8Weight:
    if isinstance(weight, Int8Weight):
        return weight
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for at in range(0, len(weight), ROWS_AT_ONCE):
        steps, each = rounded_rows(weight[at : at + ROWS_AT_ONCE], MOST)
        values[at : at + ROWS_AT_ONCE] = steps.round_()
        scales[at : at + ROWS_AT_ONCE] = each[:, 0]
    return Int8Weight(values, scales)


def _round_fp8(weight: Weight) -> tuple[Tensor, Tensor]:
    """Values and scales `[out, 1]`."""
    source = weight.values if isinstance(weight, Int8Weight) else weight
    values = torch.empty(weight.shape, dtype=FP8, device=source.device)
    scales = torch.empty(len(source), 1, device=source.device)
    for at in range(0, len(source), ROWS_AT_ONCE):
        here = slice(at, at + ROWS_AT_ONCE)
        part = (
            weight[here]
            if isinstance(weight, Tensor)
            else weight.cut(here, slice(None)).dequantize()
        )
        steps, scales[here] = rounded_rows(part, FP8_MOST)
        values[here] = steps.to(FP8)
    return values, scales
