"""Panels as torch packs them, for comparison."""

# mypy: disable-error-code="no-untyped-call"
import torch
from torch import Tensor

from engine.worker.cpu.kernels.linears.grouped_panels import WORD, Panel, StepFormat
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.weights.formats.grouped import GroupLayout, Groups


def panels_of(tensor: Tensor, *, per_item: int = 1) -> Tensor:
    """`[out, items * per_item]` as `[panels, items, per_item, WIDTH]`; channels of the last panel
    may be zeros."""
    whole = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % WIDTH))
    panels: Tensor = whole.unflatten(1, (-1, per_item)).unflatten(0, (-1, WIDTH))
    return panels.permute(0, 2, 3, 1)


def packed_groups(groups: Groups, layout: GroupLayout, steps: StepFormat) -> Tensor:
    """Panels `[panels, blocks, bytes]` of uint8, as `grouped_panels` describes them."""

    def by_block(tensor: Tensor, *, per_block: int) -> Tensor:
        return panels_of(tensor, per_item=per_block).contiguous().view(torch.uint8)

    of_block = [groups.scales, *([] if groups.minimums is None else [groups.minimums])]
    of_group = [groups.factors, groups.minimum_factors, groups.zeros]
    parts = [by_block(each, per_block=layout.groups) for each in of_group if each is not None]
    for plane in Panel(layout).planes:
        words = _plane_words(groups.steps >> plane.shift, plane.bits, steps.inputs)
        in_group = layout.group // plane.inputs
        lines = by_block(words, per_block=layout.groups * in_group)
        parts.append(lines.unflatten(2, (layout.groups, -1)).flatten(3))
    body = torch.cat(parts, dim=3).flatten(2)
    return torch.cat([*(by_block(each, per_block=1).flatten(2) for each in of_block), body], dim=2)


def _plane_words(steps: Tensor, bits: int, at_once: int) -> Tensor:
    """The lowest `bits` of each step, `[out, in]`, in words of int32 `[out, in * bits / 32]`.

    Part p of a word, `word >> bits * p` masked, holds the next `at_once` steps, one in each field
    of `32 / at_once` bits.
    """
    by_word = (steps & ((1 << bits) - 1)).unflatten(1, (-1, WORD // bits))
    words = torch.zeros(by_word.shape[:2], dtype=torch.int32)
    for k in range(WORD // bits):
        part, field = divmod(k, at_once)
        words |= by_word[:, :, k].to(torch.int32) << (bits * part + field * (WORD // at_once))
    return words
