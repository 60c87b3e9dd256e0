"""Linears with weights in groups of inputs that share a scale, and quantized inputs."""

# mypy: disable-error-code="no-untyped-call"
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels.linears import grouped_linear
from engine.worker.cpu.kernels.linears.group_packing import GroupPackingOperands, packing_kernel
from engine.worker.cpu.kernels.linears.grouped_panels import (
    INT8_STEPS,
    INT16_STEPS,
    Panel,
    StepFormat,
)
from engine.worker.cpu.linears.packed import InputFormat, PackedWeights
from engine.worker.cpu.linears.panels import chunks_of, num_panels
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import Weight
from engine.worker.weights.formats.blocks import BlockFormat, plain_rows
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout
from engine.worker.weights.formats.int4 import GROUP, SYMMETRIC, quantize
from engine.worker.weights.formats.llama_cpp import BLOCKS

ELEMENTS_AT_ONCE = 1 << 20  # so many are unpacked, or widened, together
INPUTS = {  # by width: the name in reports, the steps that are multiplied, the kernel
    8: ("8-bit activations, VNNI", INT8_STEPS, grouped_linear.quantize_groups_to_8_bits),
    14: ("14-bit activations", INT16_STEPS, grouped_linear.quantize_groups_to_14_bits),
}


@dataclass(frozen=True, slots=True)
class GroupedLinears:
    """Linears with weights in one layout and one width of inputs."""

    layout: GroupLayout
    name: str
    inputs: InputFormat
    steps: StepFormat
    kernel: Callable[..., None]

    @property
    def description(self) -> str:
        return f"{self.layout.name} ({self.name})"

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        return self.inputs.convert, self.kernel

    @property
    def packing_kernels(self) -> tuple[Callable[..., None], ...]:
        """The kernels that pack weights of this layout, from each format of blocks."""
        plain, stored = BlockFormat.plain(self.layout), BLOCKS.get(self.layout.name)
        formats = (plain,) if stored is None else (stored, plain)
        return tuple(packing_kernel(each, self.steps) for each in formats)

    def pack(
        self, weights: Sequence[Weight], pages: WeightPages, pool: NativeThreadPool
    ) -> PackedWeights:
        parts = [self._in_layout(weight) for weight in weights]
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        blocks = -(-inputs // self.layout.block)
        shape = (num_panels(outputs), blocks, Panel(self.layout).block_bytes)
        packed = pages.take(shape, torch.uint8)
        packed[-1].zero_()  # channels without weights
        first = 0
        with pool.awake():
            for part in parts:
                for rows, format in _rows_of_blocks(part):
                    _pack(pool, rows, format, self.steps, packed, first)
                    first += len(rows)
        return PackedWeights(packed, outputs, blocks * self.layout.block)

    def _in_layout(self, weight: Weight) -> GroupedWeight:
        """The weight itself; other ones are quantized if the format is int4."""
        if isinstance(weight, GroupedWeight) and weight.layout == self.layout:
            return weight
        assert self.layout == SYMMETRIC[GROUP], f"{self.layout.name} weights come from files only"
        return quantize(weight)


@cache
def grouped_linears(layout: GroupLayout, activation_bits: int) -> GroupedLinears:
    """The linears of a layout whose inputs have 8 or 14 bits."""
    name, steps, convert = INPUTS[activation_bits]
    inputs = InputFormat(
        torch.uint8,
        convert,
        group=layout.group,
        group_items=steps.x_group_bytes(layout.group),
        middle=0 if layout.has_offsets else layout.middle,
    )
    kernel = grouped_linear.linear_kernel(layout, steps)
    return GroupedLinears(layout, name, inputs, steps, kernel)


def _rows_of_blocks(weight: GroupedWeight) -> Iterator[tuple[Tensor, BlockFormat]]:
    """All rows of a weight as blocks: as they are, or some rows at a time in the plain format."""
    if isinstance(weight.unpack, BlockFormat):
        yield weight.tensors[""], weight.unpack
        return
    format, step = BlockFormat.plain(weight.layout), max(1, ELEMENTS_AT_ONCE // weight.inputs)
    for at in range(0, weight.shape[0], step):
        groups = weight.rows(slice(at, at + step)).groups
        yield plain_rows(groups, weight.layout), format


def _pack(
    pool: NativeThreadPool,
    rows: Tensor,
    format: BlockFormat,
    steps: StepFormat,
    packed: Tensor,
    first: int,
) -> None:
    """Pack rows of blocks, uint8 `[out, bytes]`, as channels `first` and following of panels.

    Raises `StartupError` if float16 lacks one of their scales.
    """
    spread = torch.empty((pool.threads, format.layout.block), dtype=torch.uint8)
    operands = GroupPackingOperands(
        x=rows.data_ptr(),
        x_stride=rows.stride(0),
        rows=len(rows),
        first=first,
        blocks=packed.shape[1],
        y=packed.data_ptr(),
        steps=spread.data_ptr(),
    )
    KernelCall(pool, packing_kernel(format, steps), operands)(chunks_of(first, len(rows)))
    if operands.lacks_scales:
        format({"": rows})  # raises
