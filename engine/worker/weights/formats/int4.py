"""int4 weights: 16 steps, with float16 scales for each 32, 64 or 128 inputs of an output channel.

The numbers of `--weights int4` are those of llama.cpp's Q4_0: `scale * (nibble - 8)`, nibbles from
0 to 15, in groups of 32. GPTQ and AWQ checkpoints may have zero points and larger groups.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from engine.worker.ports import Weight, dequantize
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups

GROUP = 32  # inputs with one scale
MIDDLE = 8  # the nibble that stands for 0
ELEMENTS_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # are quantized together; a CPU has a cache
SCALES, ZEROS = "_scales", "_zeros"  # names in `GroupedWeight.tensors`
# Of these fractions of a group's largest weight, the one with the least squared error is its range.
FRACTIONS = (1.1, 1.05, 1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.8)

SYMMETRIC = {
    32: GroupLayout("int4", 32, 4, MIDDLE),
    64: GroupLayout("int4_64", 64, 4, MIDDLE),
    128: GroupLayout("int4_128", 128, 4, MIDDLE),
}
WITH_ZEROS = {
    group: GroupLayout(f"uint4_{group}", group, 4, 0, has_zeros=True) for group in SYMMETRIC
}


def int4_weight(
    nibbles: Tensor, scales: Tensor, inputs: int, group: int = GROUP, zeros: Tensor | None = None
) -> GroupedWeight:
    """A weight of these tensors, all of them padded to whole groups of inputs.

    `nibbles` is uint8 `[out, in / 2]` with input 2i in the low bits and 2i + 1 in the high bits,
    `scales` is float16 `[out, groups]`, `zeros` is int8 `[out, groups]`.
    """
    layout = SYMMETRIC[group] if zeros is None else WITH_ZEROS[group]
    tensors = {"": nibbles, SCALES: scales} | ({} if zeros is None else {ZEROS: zeros})
    return GroupedWeight(layout, MappingProxyType(tensors), inputs, _unpack)


def _unpack(tensors: Mapping[str, Tensor]) -> Groups:
    nibbles = tensors[""]
    steps = torch.stack((nibbles & 15, nibbles >> 4), dim=2).flatten(1)
    return Groups(steps, tensors[SCALES], zeros=tensors.get(ZEROS))


def quantize(weight: Weight) -> GroupedWeight:
    """The weight in int4, each element rounded to the nearest step of its group."""
    if isinstance(weight, GroupedWeight) and weight.layout == SYMMETRIC[GROUP]:
        return weight
    floats = dequantize(weight)
    outputs, inputs = floats.shape
    groups = -(-inputs // GROUP)
    place = floats.device
    nibbles = torch.empty((outputs, groups * GROUP // 2), dtype=torch.uint8, device=place)
    scales = torch.empty((outputs, groups), dtype=torch.float16, device=place)
    rows_at_once = max(1, ELEMENTS_AT_ONCE.get(place.type, outputs * inputs) // inputs)
    for at in range(0, outputs, rows_at_once):
        here = slice(at, at + rows_at_once)
        rows = floats[here].to(torch.float32)
        rows = torch.nn.functional.pad(rows, (0, groups * GROUP - inputs))
        steps, scales[here] = _quantize_groups(rows.view(-1, groups, GROUP))
        steps = steps.flatten(1)
        nibbles[here] = steps[:, ::2] | (steps[:, 1::2] << 4)
    return int4_weight(nibbles, scales, inputs)


def _quantize_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Steps in uint8, and scales, of `[rows, groups, GROUP]` floats.

    The largest magnitude becomes -8 steps, so the scale has the opposite sign of its weight.
    """
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2)
    best_error = torch.full_like(largest, torch.inf)
    best_steps = torch.zeros_like(groups)
    best_scales = torch.zeros_like(largest, dtype=torch.float16)
    for fraction in FRACTIONS:
        scales = (largest * (-fraction / MIDDLE)).to(torch.float16)
        own = scales.to(torch.float32)[:, :, None]
        inverse = torch.where(own != 0, 1 / own, 0.0)
        steps = (groups * inverse).round_().clamp_(-MIDDLE, MIDDLE - 1)
        error = (steps * own).sub_(groups).square_().sum(dim=2)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scales = torch.where(is_better, scales, best_scales)
        best_steps = torch.where(is_better[:, :, None], steps, best_steps)
    return best_steps.add_(MIDDLE).to(torch.uint8), best_scales


class Int4Format:
    """The `LinearFormat` of int4."""

    name = "int4"
    bits = 4 + 16 / GROUP

    def convert(self, weight: Weight) -> GroupedWeight:
        return quantize(weight)


INT4 = Int4Format()
