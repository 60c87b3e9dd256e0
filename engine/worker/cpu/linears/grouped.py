"""Linears with weights in groups of inputs that share a scale, and quantized inputs."""

# mypy: disable-error-code="no-untyped-call"
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.worker.cpu.kernels.linears import grouped_linear
from engine.worker.cpu.kernels.linears.grouped_panels import (
    INT8_STEPS,
    INT16_STEPS,
    WORD,
    Panel,
    StepFormat,
)
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.linears.packed import InputFormat, PackedWeights
from engine.worker.cpu.pages import WeightPages
from engine.worker.ports import Weight
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups, stack_rows
from engine.worker.weights.formats.int4 import GROUP, SYMMETRIC, quantize

ELEMENTS_AT_ONCE = 1 << 20  # so many are packed together
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

    def pack(self, weights: Sequence[Weight], pages: WeightPages) -> PackedWeights:
        whole = stack_rows([self._in_layout(weight) for weight in weights])
        outputs, inputs = whole.shape
        blocks = -(-inputs // self.layout.block)
        shape = (-(-outputs // WIDTH), blocks, Panel(self.layout).block_bytes)
        packed = pages.take(shape, torch.uint8)
        rows = max(1, ELEMENTS_AT_ONCE // inputs // WIDTH) * WIDTH
        for at in range(0, outputs, rows):
            part = whole.rows(slice(at, at + rows)).groups
            here = pack_groups(part, self.layout, self.steps)
            packed[at // WIDTH : at // WIDTH + len(here)] = here
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


def pack_groups(groups: Groups, layout: GroupLayout, steps: StepFormat) -> Tensor:
    """Panels `[panels, blocks, bytes]` of uint8, as `grouped_tiles` describes them.

    The last panel is padded with channels whose scales are 0.
    """
    outputs, padded = groups.steps.shape
    panels, blocks = -(-outputs // WIDTH), padded // layout.block

    def by_panel(tensor: Tensor, *, per_block: int) -> Tensor:
        """`[out, …]` as uint8 `[panels, blocks, per_block, WIDTH * item size]`."""
        missing = panels * WIDTH - outputs
        whole = torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor
        whole = whole.view(panels, WIDTH, blocks, per_block).permute(0, 2, 3, 1).contiguous()
        return whole.view(torch.uint8)

    of_block = [groups.scales, *([] if groups.minimums is None else [groups.minimums])]
    of_group = [groups.factors, groups.minimum_factors, groups.zeros]
    parts = [by_panel(each, per_block=layout.groups) for each in of_group if each is not None]
    for plane in Panel(layout).planes:
        words = plane_words(groups.steps >> plane.shift, plane.bits, steps.inputs)
        in_group = layout.group // plane.inputs
        lines = by_panel(words, per_block=layout.groups * in_group)
        parts.append(lines.view(panels, blocks, layout.groups, -1))
    body = torch.cat(parts, dim=3).flatten(2)
    return torch.cat([*(by_panel(each, per_block=1).flatten(2) for each in of_block), body], dim=2)


def plane_words(steps: Tensor, bits: int, at_once: int) -> Tensor:
    """The lowest `bits` of each step, `[out, in]`, in words of int32 `[out, in * bits / 32]`.

    Part p of a word, `word >> bits * p` masked, holds the next `at_once` steps, one in each field
    of `32 / at_once` bits.
    """
    by_word = (steps & ((1 << bits) - 1)).unflatten(1, (-1, WORD // bits))
    words = torch.zeros(by_word.shape[:2], dtype=torch.int32)
    for k in range(WORD // bits):
        part, field = divmod(k, at_once)
        shift = bits * part + field * (WORD // at_once)
        words |= by_word[:, :, k].to(torch.int32) << shift
    return words
