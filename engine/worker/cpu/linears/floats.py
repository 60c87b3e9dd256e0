"""Linears with float weights: in float32, float16 and bfloat16, with sums in float32."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.worker.cpu.kernels.linears import linear
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX, HAS_BFLOAT16, PADDING, PAIR
from engine.worker.cpu.linears.packed import InputFormat, PackedWeights
from engine.worker.cpu.linears.panels import in_items, pack, packing_kernel
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import Weight, dequantize

BFLOAT16_INPUTS = InputFormat(torch.bfloat16, linear.convert_to_bfloat16, is_quantized=False)


def _floats(weights: Sequence[Weight], dtype: torch.dtype) -> list[Tensor]:
    """The weights as floats; quantized ones are dequantized."""
    return [dequantize(weight).to(dtype) for weight in weights]


class Float32Linears:
    """Linears in float32."""

    description = "float32"
    kernels: tuple[Callable[..., None], ...] = (linear.linear_float32,)
    packing_kernels: tuple[Callable[..., None], ...] = (packing_kernel(torch.float32),)
    inputs: InputFormat | None = None

    @property
    def kernel(self) -> Callable[..., None]:
        return linear.linear_float32

    def pack(
        self, weights: Sequence[Weight], pages: WeightPages, pool: NativeThreadPool
    ) -> PackedWeights:
        return _pack_each(_floats(weights, torch.float32), pages, pool)


class Float16Linears:
    """Linears whose weights are float16, which the CPU widens in registers."""

    description = "float16"
    kernels: tuple[Callable[..., None], ...] = (linear.linear_float16,)
    packing_kernels: tuple[Callable[..., None], ...] = (packing_kernel(torch.int16),)
    inputs: InputFormat | None = None

    @property
    def kernel(self) -> Callable[..., None]:
        return linear.linear_float16

    def pack(
        self, weights: Sequence[Weight], pages: WeightPages, pool: NativeThreadPool
    ) -> PackedWeights:
        return _pack_each(_floats(weights, torch.float16), pages, pool)


class BFloat16Linears:
    """Linears whose weights are bfloat16; products are added in float32. Inputs are bfloat16 where
    the CPU has instructions for that; else they stay float32."""

    description = "bfloat16" + (" (AMX)" if HAS_AMX else " (AVX-512 BF16)" if HAS_BFLOAT16 else "")
    kernels: tuple[Callable[..., None], ...] = (
        *((linear.convert_to_bfloat16,) if HAS_BFLOAT16 else ()),
        linear.linear_bfloat16,
    )
    packing_kernels: tuple[Callable[..., None], ...] = (
        packing_kernel(torch.int32 if HAS_BFLOAT16 else torch.int16),
    )
    inputs = BFLOAT16_INPUTS if HAS_BFLOAT16 else None

    @property
    def kernel(self) -> Callable[..., None]:
        return linear.linear_bfloat16

    def pack(
        self, weights: Sequence[Weight], pages: WeightPages, pool: NativeThreadPool
    ) -> PackedWeights:
        parts = _floats(weights, torch.bfloat16)
        if not HAS_BFLOAT16:
            return _pack_each(parts, pages, pool)
        pairs = [in_items(part, torch.int32) for part in parts]
        items = -(-pairs[0].shape[1] // PADDING) * PADDING
        packed = pack(pairs, items, pages, pool)
        return PackedWeights(packed, sum(map(len, parts)), PAIR * items)


def _pack_each(
    parts: Sequence[Tensor], pages: WeightPages, pool: NativeThreadPool
) -> PackedWeights:
    """Weights, each on its own: those of 16 bits as integers."""
    inputs = parts[0].shape[1]
    halves = [part.view(torch.int16) if part.itemsize == 2 else part for part in parts]
    return PackedWeights(pack(halves, inputs, pages, pool), sum(map(len, parts)), inputs)


FLOAT32, FLOAT16, BFLOAT16 = Float32Linears(), Float16Linears(), BFloat16Linears()
