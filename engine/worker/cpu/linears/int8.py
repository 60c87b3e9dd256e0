"""Linears with int8 weights and quantized inputs.

A quarter of the bytes of float32 makes single streams faster, and several products in one
instruction make batches faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels.linears import int8_linear
from engine.worker.cpu.kernels.linears.int8_linear import DEPTH
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.linears.packing import SumOperands, sum_int8
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX, HAS_VNNI, PADDING, PAIR, QUAD
from engine.worker.cpu.linears.packed import InputFormat, PackedWeights
from engine.worker.cpu.linears.panels import in_items, num_panels, pack, packing_kernel
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import Weight
from engine.worker.weights.formats.int8 import quantize


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

    @property
    def packing_kernels(self) -> tuple[Callable[..., None], ...]:
        return packing_kernel(self.packed_dtype), sum_int8

    def pack(
        self, weights: Sequence[Weight], pages: WeightPages, pool: NativeThreadPool
    ) -> PackedWeights:
        parts = [quantize(weight) for weight in weights]
        values = [in_items(part.values, self.packed_dtype) for part in parts]
        items = -(-values[0].shape[1] // PADDING) * PADDING
        packed = pack(values, items, pages, pool)
        return PackedWeights(
            packed=packed,
            outputs=sum(len(part.values) for part in parts),
            inputs=items * self.group,
            scale=torch.cat([part.scales for part in parts]),
            offset=offsets([part.values for part in parts], self.zero, pool),
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


def offsets(parts: Sequence[Tensor], zero: int, pool: NativeThreadPool) -> Tensor:
    """What `zero` in place of 0 adds to sums over each piece of k, int32 `[pieces, outputs]`, with
    zeros up to a whole panel."""
    outputs = num_panels(sum(map(len, parts))) * WIDTH
    found = torch.zeros((-(-parts[0].shape[1] // DEPTH), outputs), dtype=torch.int32)
    first = 0
    with pool.awake():
        for part in parts:
            rows = part if part.stride(1) == 1 else part.contiguous()
            operands = SumOperands(
                x=rows.data_ptr(),
                x_stride=rows.stride(0),
                width=rows.shape[1],
                depth=DEPTH,
                factor=zero,
                y=found[:, first:].data_ptr(),
                outputs=outputs,
            )
            KernelCall(pool, sum_int8, operands).over_rows(len(rows))
            first += len(rows)
    return found
