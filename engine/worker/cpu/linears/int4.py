"""Linears with int4 weights in groups of 32 inputs, and quantized inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.cpu.kernels import int4_linear
from engine.worker.cpu.kernels.grouped_tiles import (
    BLOCK,
    BLOCKS,
    GROUP,
    GROUP_BYTES,
    INT8_NIBBLES,
    INT16_NIBBLES,
    SCALE_BYTES,
    NibbleFormat,
)
from engine.worker.cpu.kernels.packed_tiles import WIDTH
from engine.worker.cpu.linears.packed import InputFormat, PackedWeights
from engine.worker.cpu.pages import WeightPages
from engine.worker.ports import Weight
from engine.worker.weights.formats.int4 import MIDDLE, Int4Weight, quantize


@dataclass(frozen=True, slots=True)
class Int4Linears:
    """Linears with int4 weights and one width of inputs; other weights are quantized."""

    name: str
    inputs: InputFormat
    nibbles: NibbleFormat
    kernel: Callable[..., None]

    @property
    def description(self) -> str:
        return f"int4 ({self.name})"

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        return self.inputs.convert, self.kernel

    def pack(self, weights: Sequence[Weight], pages: WeightPages) -> PackedWeights:
        parts = [quantize(weight) for weight in weights]
        outputs, groups = sum(len(part.nibbles) for part in parts), parts[0].scales.shape[1]
        packed = pages.take((-(-outputs // WIDTH), groups, GROUP_BYTES), torch.uint8)
        pack_int4(parts, packed, self.nibbles)
        return PackedWeights(packed, outputs, groups * GROUP)


def pack_int4(parts: Sequence[Int4Weight], packed: Tensor, nibbles: NibbleFormat) -> None:
    """Write weights stacked along out to panels `[panels, groups, GROUP_BYTES]`, padded with 0."""
    panels, groups, _ = packed.shape
    scales = torch.cat([part.scales for part in parts])
    missing = panels * WIDTH - len(scales)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, missing))
    by_panel = scales.view(panels, WIDTH, groups).transpose(1, 2).contiguous()
    packed[:, :, :SCALE_BYTES] = by_panel.view(torch.uint8)
    steps = torch.cat([part.steps for part in parts])
    steps = torch.nn.functional.pad(steps, (0, 0, 0, missing), value=MIDDLE)
    lanes = _lanes(steps.view(panels, WIDTH, groups, BLOCKS, BLOCK), nibbles)
    blocks = lanes.permute(0, 2, 3, 1).contiguous()  # [panels, groups, BLOCKS, WIDTH] int32
    packed[:, :, SCALE_BYTES:] = blocks.view(panels, groups, -1).view(torch.uint8)


def _lanes(steps: Tensor, nibbles: NibbleFormat) -> Tensor:
    """The 8 steps of each block, `[..., BLOCK]`, in an int32.

    Part p of a lane, `lane >> 4 * p` masked, holds the next `nibbles.inputs` steps, one in each
    field of `32 / nibbles.inputs` bits.
    """
    field_bits = 32 // nibbles.inputs
    lanes = torch.zeros(steps.shape[:-1], dtype=torch.int64)
    for k in range(BLOCK):
        part, field = divmod(k, nibbles.inputs)
        lanes |= steps[..., k].to(torch.int64) << (4 * part + field * field_bits)
    return torch.where(lanes >= 1 << 31, lanes - (1 << 32), lanes).to(torch.int32)


WITH_8_BITS = Int4Linears(
    name="8-bit activations, VNNI",
    inputs=InputFormat(
        torch.uint8,
        int4_linear.quantize_groups_to_8_bits,
        group=GROUP,
        group_items=INT8_NIBBLES.x_group_bytes,
    ),
    nibbles=INT8_NIBBLES,
    kernel=int4_linear.linear_int4_8_bits,
)
WITH_14_BITS = Int4Linears(
    name="14-bit activations",
    inputs=InputFormat(
        torch.uint8,
        int4_linear.quantize_groups_to_14_bits,
        group=GROUP,
        group_items=INT16_NIBBLES.x_group_bytes,
    ),
    nibbles=INT16_NIBBLES,
    kernel=int4_linear.linear_int4_14_bits,
)
