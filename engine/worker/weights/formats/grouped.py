"""Quantized weights in groups: runs of inputs of an output channel that share a scale.

    weight = scale * (step - middle) - minimum

A step is an unsigned integer of 4 to 8 bits, or one that a 4-bit code stands for. The formats of
llama.cpp (Q4_0, Q4_K, Q6_K, …), of compressed-tensors, GPTQ and AWQ differ in their `GroupLayout`,
and in the order of bits in a file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

ELEMENTS_AT_ONCE = 1 << 22  # so many are dequantized together


class GroupLayout(NamedTuple):
    """What describes the weights of one format, whatever the order of bits in a file.

    A block is `groups` groups with one float16 scale. A block of several groups (llama.cpp's K
    formats) also has an int8 factor for each: a group's scale is their product. A minimum is a
    float16 of the block, times the group's own int8 factor if the block has several groups. A zero
    point is an int8 per group, and its minimum is `scale * zero`. With `codes` the weights are
    stored as 4-bit codes, and `codes[code]` is the step.
    """

    name: str
    group: int  # inputs
    bits: int  # stored bits per step: 4, 5, 6 or 8
    middle: int
    groups: int = 1
    has_minimums: bool = False
    has_zeros: bool = False
    codes: tuple[int, ...] = ()

    @property
    def block(self) -> int:
        """The inputs of a block."""
        return self.group * self.groups

    @property
    def has_factors(self) -> bool:
        return self.groups > 1

    @property
    def has_offsets(self) -> bool:
        """Whether weights have minimums, of either kind."""
        return self.has_minimums or self.has_zeros


class Groups(NamedTuple):
    """Weights of one layout; all tensors are padded to whole blocks. Fields it lacks are None."""

    steps: Tensor  # uint8 [out, padded in]; codes if the layout has them
    scales: Tensor  # float16 [out, blocks]
    factors: Tensor | None = None  # int8 [out, groups]
    minimums: Tensor | None = None  # float16 [out, blocks]
    minimum_factors: Tensor | None = None  # int8 [out, groups]
    zeros: Tensor | None = None  # int8 [out, groups]


Unpack = Callable[[Mapping[str, Tensor]], Groups]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A `QuantizedWeight` `[out, inputs]` in the bytes of its file.

    `unpack` gives the `Groups` of some rows of `tensors`.
    """

    layout: GroupLayout
    tensors: Mapping[str, Tensor]  # [out, …]
    inputs: int
    unpack: Unpack

    @property
    def format(self) -> str:
        return self.layout.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(next(iter(self.tensors.values()))), self.inputs))

    def map(self, function: Callable[[Tensor], Tensor]) -> "GroupedWeight":
        mapped = {name: function(tensor) for name, tensor in self.tensors.items()}
        return replace(self, tensors=MappingProxyType(mapped))

    def rows(self, rows: slice) -> "GroupedWeight":
        return self.map(lambda tensor: tensor[rows])

    @property
    def groups(self) -> Groups:
        return self.unpack(self.tensors)

    def dequantize(self) -> Tensor:
        whole = torch.empty(self.shape, device=next(iter(self.tensors.values())).device)
        step = max(1, ELEMENTS_AT_ONCE // self.inputs)
        for at in range(0, len(whole), step):
            part = self.rows(slice(at, at + step)).groups
            whole[at : at + step] = dequantize_groups(part, self.layout)[:, : self.inputs]
        return whole


def dequantize_groups(groups: Groups, layout: GroupLayout) -> Tensor:
    """The weights in float32, `[out, padded in]`."""
    outputs = len(groups.steps)
    scales, offsets = scales_and_offsets(groups, layout)
    steps = groups.steps.view(outputs, -1, layout.group)
    if layout.codes:
        steps = torch.tensor(layout.codes, dtype=torch.uint8, device=steps.device)[steps.long()]
    steps = steps.to(torch.float32)
    values = (steps - layout.middle).mul_(scales[:, :, None])
    if offsets is not None:
        values += offsets[:, :, None]
    return values.flatten(1)


def scales_and_offsets(groups: Groups, layout: GroupLayout) -> tuple[Tensor, Tensor | None]:
    """Float32 `[out, groups]`: weights are `scale * (step - middle) + offset`; None: no offsets."""
    scales = _times(groups.scales, groups.factors, layout)
    if groups.minimums is not None:
        return scales, -_times(groups.minimums, groups.minimum_factors, layout)
    return scales, None if groups.zeros is None else -scales * groups.zeros


def _times(of_blocks: Tensor, of_groups: Tensor | None, layout: GroupLayout) -> Tensor:
    """A number for each group, float32 `[out, groups]`."""
    whole = of_blocks.to(torch.float32).repeat_interleave(layout.groups, dim=1)
    return whole if of_groups is None else whole * of_groups
