"""MXFP4 weights: 4-bit floats in groups of 32 inputs that share a power of two as their scale.

The numbers of a group are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign, times `2 ** (exponent - 127)`
(Open Compute Project, Microscaling Formats 1.0, sections 5.2 and 6.3.3). Twice these numbers are
integers, so they are steps around `MIDDLE` with half the scale.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from engine.worker.ports import Weight
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups

GROUP = 32
MIDDLE = 12
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)  # twice each number without its sign, by code
CODES = (*(MIDDLE + each for each in DOUBLED), *(MIDDLE - each for each in DOUBLED))
MXFP4 = GroupLayout("mxfp4", GROUP, 4, MIDDLE, codes=CODES)
BIAS = 127 + 1  # the bias of the halved scales' exponents
SMALLEST, LARGEST = -24, 15  # exponents that float16 has
EXPONENTS = "_exponents"  # name in `GroupedWeight.tensors`


def mxfp4_weight(nibbles: Tensor, exponents: Tensor) -> Weight:
    """A weight of these tensors: uint8 `[out, in / 2]` with input 2i in the low bits, and uint8
    `[out, groups]`. In float32 if float16 does not have all of its scales."""
    tensors = MappingProxyType({"": nibbles, EXPONENTS: exponents})
    if halved_scales(exponents) is not None:
        return GroupedWeight(MXFP4, tensors, 2 * nibbles.shape[1], _unpack)
    whole = GroupedWeight(MXFP4, tensors, 2 * nibbles.shape[1], _unpack_wide)
    return whole.dequantize()


def halved_scales(exponents: Tensor) -> Tensor | None:
    """Half of the scales in float16; None if float16 does not have all of them."""
    if exponents.numel():
        least, most = (int(each) - BIAS for each in exponents.aminmax())
        if least < SMALLEST or most > LARGEST:
            return None
    return torch.exp2(exponents.float() - BIAS).half()


def _unpack(tensors: Mapping[str, Tensor]) -> Groups:
    wide = _unpack_wide(tensors)
    return wide._replace(scales=wide.scales.half())


def _unpack_wide(tensors: Mapping[str, Tensor]) -> Groups:
    """The values with scales in float32."""
    nibbles = tensors[""]
    codes = torch.stack((nibbles & 15, nibbles >> 4), dim=2).flatten(1)
    return Groups(codes, torch.exp2(tensors[EXPONENTS].float() - BIAS))
