"""Packs weights into panels, in the order in which the tiles of `packed_tiles` read them."""

from torch import Tensor

from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.pages import WeightPages


def pack(weight: Tensor, pages: WeightPages) -> Tensor:
    """`[out, groups]` as `[panels, groups, WIDTH]`; the last panel is padded with zeros."""
    outputs, groups = weight.shape
    whole, rest = divmod(outputs, WIDTH)
    packed = pages.take((whole + (rest > 0), groups, WIDTH), weight.dtype)
    lines = weight[: whole * WIDTH].reshape(whole, WIDTH, groups)
    packed[:whole].copy_(lines.transpose(1, 2))
    if rest:
        packed[whole].zero_()
        packed[whole, :, :rest].copy_(weight[whole * WIDTH :].T)
    return packed
