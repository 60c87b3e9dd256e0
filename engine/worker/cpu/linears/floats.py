"""Linears with float weights: in float32, float16 and bfloat16, with sums in float32."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.worker.cpu.kernels.linears import linear
from engine.worker.cpu.kernels.linears.packing import pack
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX, HAS_BFLOAT16, PADDING, PAIR
from engine.worker.cpu.linears.packed import InputFormat, PackedWeights
from engine.worker.cpu.pages import WeightPages
from engine.worker.ports import Weight, dequantize

BFLOAT16_INPUTS = InputFormat(torch.bfloat16, linear.convert_to_bfloat16, is_quantized=False)


def stack_floats(weights: Sequence[Weight]) -> Tensor:
    """Weights `[out, in]` as one float tensor; quantized weights are dequantized."""
    parts = [dequantize(weight) for weight in weights]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Float32Linears:
    """Linears in float32."""

    description = "float32"
    kernels: tuple[Callable[..., None], ...] = (linear.linear_float32,)
    inputs: InputFormat | None = None

    @property
    def kernel(self) -> Callable[..., None]:
        return linear.linear_float32

    def pack(self, weights: Sequence[Weight], pages: WeightPages) -> PackedWeights:
        whole = stack_floats(weights).to(torch.float32)
        outputs, inputs = whole.shape
        return PackedWeights(pack(whole, pages), outputs, inputs)


class Float16Linears:
    """Linears whose weights are float16, which the CPU widens in registers."""

    description = "float16"
    kernels: tuple[Callable[..., None], ...] = (linear.linear_float16,)
    inputs: InputFormat | None = None

    @property
    def kernel(self) -> Callable[..., None]:
        return linear.linear_float16

    def pack(self, weights: Sequence[Weight], pages: WeightPages) -> PackedWeights:
        return _pack_halves(stack_floats(weights).to(torch.float16), pages)


class BFloat16Linears:
    """Linears whose weights are bfloat16; products are added in float32. Inputs are bfloat16 where
    the CPU has instructions for that; else they stay float32."""

    description = "bfloat16" + (" (AMX)" if HAS_AMX else " (AVX-512 BF16)" if HAS_BFLOAT16 else "")
    kernels: tuple[Callable[..., None], ...] = (
        *((linear.convert_to_bfloat16,) if HAS_BFLOAT16 else ()),
        linear.linear_bfloat16,
    )
    inputs = BFLOAT16_INPUTS if HAS_BFLOAT16 else None

    @property
    def kernel(self) -> Callable[..., None]:
        return linear.linear_bfloat16

    def pack(self, weights: Sequence[Weight], pages: WeightPages) -> PackedWeights:
        whole = stack_floats(weights).to(torch.bfloat16)
        if not HAS_BFLOAT16:
            return _pack_halves(whole, pages)
        outputs, inputs = whole.shape
        padded = -(-inputs // (PAIR * PADDING)) * PAIR * PADDING
        if padded != inputs:
            whole = torch.nn.functional.pad(whole, (0, padded - inputs))
        pairs = whole.contiguous().view(torch.int32)
        return PackedWeights(pack(pairs, pages), outputs, padded)


def _pack_halves(whole: Tensor, pages: WeightPages) -> PackedWeights:
    """Weights of 16 bits, each on its own."""
    return PackedWeights(pack(whole.view(torch.int16), pages), *whole.shape)


FLOAT32, FLOAT16, BFLOAT16 = Float32Linears(), Float16Linears(), BFloat16Linears()
