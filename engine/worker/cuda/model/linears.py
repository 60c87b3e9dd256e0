"""Linear layers on a GPU: float, int8 and fp8 weights.

8-bit weights have one scale per output channel; activations are quantized per token on the fly.
Products accumulate in int32 or float32, are scaled, and are rounded once to the output dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import FP8, QuantizedRows
from engine.worker.cuda.kernels.tiling import FIXED, gated_tiling, tiling_of
from engine.worker.ports import Linear, Weight
from engine.worker.weights.formats.int8 import Int8Weight

ROWS_AT_ONCE = 4096  # output channels quantized or dequantized at a time
INT8_ROWS = 17  # torch._int_mm takes no fewer rows
INT8_ALIGNMENT = 8  # both dimensions of a weight must be multiples of what the tensor cores take
FP8_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class FastProducts:
    """Our Triton kernels for norms, gates and 8-bit rows, products of few rows, 4-bit and fp8
    weights, recurrent layers, and what is around experts; without them torch is used.
    Batch-invariant products have one tiling, so that a row's result does not depend on others."""

    rows: ModuleType | None = None
    gemm: ModuleType | None = None
    four_bit: ModuleType | None = None
    fp8_weights: ModuleType | None = None
    recurrence: ModuleType | None = None
    experts: ModuleType | None = None
    is_batch_invariant: bool = False

    def product(
        self, x: Tensor, weight: Tensor, dtype: torch.dtype, *epilogue: Tensor | None
    ) -> Tensor | None:
        """`x @ weight.T` with its scales, bias and `add_to`; None if torch is chosen."""
        tiling = FIXED if self.is_batch_invariant else tiling_of(len(x), weight)
        if self.gemm is None or tiling is None:
            return None
        if not self.gemm.takes(x, weight):
            if not self.is_batch_invariant:
                return None
            x, weight = self.gemm.padded(x), self.gemm.padded(weight)
        found: Tensor = self.gemm.product(x, weight, tiling, dtype, self.gemm.Epilogue(*epilogue))
        return found

    def gated_product(
        self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor | None:
        """The gated activation of the product of 16-bit floats; None if these are two kernels."""
        tiling = None if self.is_batch_invariant else gated_tiling(len(x), len(weight))
        if self.gemm is None or tiling is None or not self.gemm.takes(x, weight):
            return None
        found: Tensor = self.gemm.gated_product(name, x, weight, tiling, bias)
        return found

    def quantized(self, x: Tensor, dtype: torch.dtype) -> QuantizedRows:
        """Rows in 8 bits with one scale each."""
        fits = self.rows is not None and x.shape[1] <= self.rows.MAX_WIDTH
        kernels = self.rows if fits and self.rows is not None else reference
        found: QuantizedRows = kernels.quantize_rows(x, dtype)
        return found


PLAIN = FastProducts()


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """A weight in the dtype of the activations."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    fast: FastProducts = PLAIN

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, added to `add_to` if given; accumulated in float32, rounded
        once."""
        y = self.fast.product(x, self.weight, x.dtype, None, None, self.bias, add_to)
        if y is not None:
            return y
        if add_to is None:
            return F.linear(x, self.weight, self.bias)
        add_to.addmm_(x, self.weight.t())
        return add_to if self.bias is None else add_to.add_(self.bias)


@dataclass(frozen=True, slots=True)
class EightBitLinear:
    """Weight and activations in int8 or in fp8 (e4m3). The kernel before it may quantize its
    input."""

    values: Tensor  # int8 or float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, 1]
    bias: Tensor | None
    fast: FastProducts = PLAIN

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the quantized input."""
        return self.values.dtype

    @property
    def width(self) -> int:
        """Columns of the input."""
        return self.values.shape[1]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return self.multiply(self.fast.quantized(x, self.dtype), x.dtype, add_to)

    def multiply(
        self, rows: QuantizedRows, dtype: torch.dtype, add_to: Tensor | None = None
    ) -> Tensor:
        """The output in `dtype`, or `add_to` with the output added in place. Sums of int8 are exact
        in int32, and scaled in float32; those of fp8 are float32."""
        extras = rows.scales, self.scales, self.bias, add_to
        y = self.fast.product(rows.values, self.values, dtype, *extras)
        if y is not None:
            return y
        if self.dtype == torch.int8:
            sums = int8_product(rows.values, self.values)
            y = sums.float().mul_(rows.scales).mul_(self.scales[:, 0])
        else:
            scales = rows.scales, self.scales.t()
            y = torch._scaled_mm(rows.values, self.values.t(), *scales, out_dtype=dtype)
        if self.bias is not None:
            y += self.bias
        return y.to(dtype) if add_to is None else add_to.add_(y)


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Linears that read the same input, with weights in different formats."""

    linears: Sequence[Linear]
    sizes: list[int]  # outputs of each

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        if add_to is None:
            return torch.cat([linear(x) for linear in self.linears], dim=1)
        for linear, columns in zip(self.linears, torch.split(add_to, self.sizes, 1), strict=True):
            linear(x, columns)
        return add_to


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in int32 of int8; weights are `[out, in]`, row-major."""
    count = len(x)
    if count < INT8_ROWS:
        x = F.pad(x, (0, 0, 0, INT8_ROWS - count))
    return torch._int_mm(x, weight.t())[:count]


def stacked(weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
    """The weights stacked along the output dimension, dequantized to `dtype`."""
    parts = [_dequantize(weight, dtype) for weight in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# Makes a linear in one format from weights in any format.
MakesLinear = Callable[[Sequence[Weight], Tensor | None, torch.dtype, FastProducts], Linear]


def float_linear(
    weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, fast: FastProducts = PLAIN
) -> FloatLinear:
    """A linear with weights in the dtype of the activations."""
    return FloatLinear(stacked(weights, dtype), bias, fast)


def int8_linear(
    weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, fast: FastProducts = PLAIN
) -> Linear:
    """An int8 linear, or a float one if the tensor cores do not take the size."""
    rows = _quantized(weights, torch.int8)
    if any(size % INT8_ALIGNMENT for size in rows.values.shape):
        return _expanded(rows, bias, dtype, fast)
    return EightBitLinear(*rows, bias, fast)


def fp8_linear(
    weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, fast: FastProducts = PLAIN
) -> Linear:
    """An fp8 linear, or a float one if the tensor cores do not take the size."""
    rows = _quantized(weights, FP8)
    if any(size % FP8_ALIGNMENT for size in rows.values.shape):
        return _expanded(rows, bias, dtype, fast)
    return EightBitLinear(*rows, bias, fast)


def _expanded(
    rows: QuantizedRows, bias: Tensor | None, dtype: torch.dtype, fast: FastProducts
) -> FloatLinear:
    return float_linear([(rows.values.float() * rows.scales).to(dtype)], bias, dtype, fast)


def device_of(weight: Weight) -> torch.device:
    """The device of a weight's tensors."""
    if isinstance(weight, Tensor):
        return weight.device
    return next(iter(weight.tensors.values())).device


def _dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Dequantize in slices, so that no whole matrix exists in float32."""
    if isinstance(weight, Tensor):
        return weight
    found = torch.empty(weight.shape, dtype=dtype, device=device_of(weight))
    for at in range(0, len(found), ROWS_AT_ONCE):
        here = slice(at, at + ROWS_AT_ONCE)
        found[here] = weight.rows(here).dequantize()
    return found


def _quantized(weights: Sequence[Weight], dtype: torch.dtype) -> QuantizedRows:
    """The weights stacked along the output dimension, in int8 or fp8."""
    parts = [_quantize(weight, dtype) for weight in weights]
    values, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return QuantizedRows(values, scales)


def _quantize(weight: Weight, dtype: torch.dtype) -> QuantizedRows:
    if isinstance(weight, Int8Weight) and dtype == torch.int8:
        return QuantizedRows(weight.values, weight.scales[:, None])
    place, outputs = device_of(weight), weight.shape[0]
    values = torch.empty(weight.shape, dtype=dtype, device=place)
    scales = torch.empty(outputs, 1, device=place)
    for at in range(0, outputs, ROWS_AT_ONCE):
        here = slice(at, at + ROWS_AT_ONCE)
        part = weight[here] if isinstance(weight, Tensor) else weight.rows(here).dequantize()
        values[here], scales[here] = reference.quantize_rows(part, dtype)
    return QuantizedRows(values, scales)
