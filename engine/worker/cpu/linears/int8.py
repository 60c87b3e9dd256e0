"""Linears with int8 weights and quantized inputs.

A quarter of the bytes of float32 makes single streams faster, and several products in one
instruction make batches faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.cpu.kernels.linears import int8_linear
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.linears.packing import pack
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX, HAS_VNNI, PADDING, PAIR, QUAD
from engine.worker.cpu.linears.packed import InputFormat, PackedWeights
from engine.worker.cpu.pages import WeightPages
from engine.worker.ports import Weight
from engine.worker.weights.formats.int8 import Int8Weight, quantize


@dataclass(frozen=True, slots=True)
class Int8Linears:
    """Linears with int8 weights and one width of inputs; float weights are quantized."""

    name: str
    inputs: InputFormat
    group: int  # inputs in 32 bits
    packed_dtype: torch.dtype  # the dtype that holds a group of weights
    zero: int  # the quantized input that stands for 0
    kernel: Callable[..., None]

    @property
    def description(self) -> str:
        return f"int8 ({self.name})"

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        return self.inputs.convert, self.kernel

    def pack(self, weights: Sequence[Weight], pages: WeightPages) -> PackedWeights:
        weight = stack_int8(weights, PADDING * self.group)
        return PackedWeights(
            packed=pack(weight.values.view(self.packed_dtype), pages),
            outputs=len(weight.scales),
            inputs=weight.shape[1],
            scale=weight.scales,
            offset=offsets(weight.values, self.zero),
        )


WITH_14_BITS = Int8Linears(
    name="14-bit activations",
    inputs=InputFormat(torch.int16, int8_linear.quantize_to_14_bits),
    group=PAIR,
    packed_dtype=torch.int16,
    zero=0,
    kernel=int8_linear.linear_14_bits,
)
WITH_8_BITS = Int8Linears(
    name="8-bit activations, " + ("AMX" if HAS_AMX else "VNNI"),
    inputs=InputFormat(torch.uint8, int8_linear.quantize_to_8_bits),
    group=QUAD,
    packed_dtype=torch.int32,
    zero=int8_linear.ZERO_UINT8,
    kernel=int8_linear.linear_8_bits,
)
FASTEST = WITH_8_BITS if HAS_VNNI else WITH_14_BITS  # on this CPU


def stack_int8(weights: Sequence[Weight], unit: int) -> Int8Weight:
    """Weights `[out, in]` stacked along out, padded with zeros to whole panels and `unit`s of in.

    Scales are not padded.
    """
    outputs = sum(weight.shape[0] for weight in weights)
    rows, depth = (
        -(-size // unit) * unit for size, unit in ((outputs, WIDTH), (weights[0].shape[1], unit))
    )
    whole = Int8Weight(torch.zeros((rows, depth), dtype=torch.int8), torch.empty(outputs))
    done = 0
    for weight in weights:
        part = quantize(weight)
        here = slice(done, done + len(part.scales))
        whole.values[here, : part.shape[1]] = part.values
        whole.scales[here] = part.scales
        done = here.stop
    return whole


def offsets(values: Tensor, zero: int) -> Tensor:
    """What `zero` in place of 0 adds to sums over each piece of k, int32 `[pieces, outputs]`."""
    pieces = torch.split(values, int8_linear.DEPTH, dim=1)
    return torch.stack([piece.sum(dim=1, dtype=torch.int32) * zero for piece in pieces])
