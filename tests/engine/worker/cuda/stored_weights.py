"""Random weights as files have them."""

import torch

from engine.worker.weights.formats import LAYOUTS
from engine.worker.weights.formats.blocks import BlockFormat, plain_rows
from engine.worker.weights.formats.grouped import GroupedWeight
from engine.worker.weights.formats.mxfp4 import mxfp4_weight
from tests.engine.worker.cpu.test_grouped import random_weight

SMALL = 256  # inputs: whole blocks of every layout


def stored(name: str, outputs: int, inputs: int = SMALL) -> GroupedWeight:
    """A weight of the layout of this name."""
    if name == "mxfp4":
        generator = torch.Generator().manual_seed(outputs)
        nibbles = torch.randint(0, 256, (outputs, inputs // 2), generator=generator)
        exponents = torch.randint(118, 124, (outputs, inputs // 32), generator=generator)
        made = mxfp4_weight(nibbles.to(torch.uint8), exponents.to(torch.uint8))
        assert isinstance(made, GroupedWeight)
        return made
    layout = LAYOUTS[name]
    groups = random_weight(layout, outputs, inputs).groups
    return BlockFormat.plain(layout).weight(plain_rows(groups, layout), inputs)
