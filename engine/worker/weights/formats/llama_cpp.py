"""The layouts of llama.cpp's formats that the CPU computes in as they are.

Q4_0 is `int4`: the same numbers. Factors of groups become 8 bits, so a weight of Q4_K has 4.63 bits
instead of 4.5; steps of 2 and 3 bits become 4, so one of Q2_K has 5.13 instead of 2.63 and one of
Q3_K 4.56 instead of 3.44. The blocks of files are those of `ggml-common.h`, and so are the numbers
that the codes of IQ4_NL and IQ4_XS stand for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from engine.worker.weights.formats.blocks import Bits, BlockFormat, Factors
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups
from engine.worker.weights.formats.int4 import SYMMETRIC
from engine.worker.weights.formats.mxfp4 import MXFP4

Q4_0 = SYMMETRIC[32]
Q4_1 = GroupLayout("q4_1", 32, 4, 0, has_minimums=True)
Q5_0 = GroupLayout("q5_0", 32, 5, 16)
Q5_1 = GroupLayout("q5_1", 32, 5, 0, has_minimums=True)
Q8_0 = GroupLayout("q8_0", 32, 8, 128)
Q2_K = GroupLayout("q2_k", 16, 4, 0, groups=16, has_minimums=True)
Q3_K = GroupLayout("q3_k", 16, 4, 4, groups=16)
Q4_K = GroupLayout("q4_k", 32, 4, 0, groups=8, has_minimums=True)
Q5_K = GroupLayout("q5_k", 32, 5, 0, groups=8, has_minimums=True)
Q6_K = GroupLayout("q6_k", 16, 6, 32, groups=16)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # by code
IQ4_NL = GroupLayout("iq4_nl", 32, 4, 128, codes=tuple(128 + number for number in IQ4))
IQ4_XS = IQ4_NL._replace(name="iq4_xs", groups=8)
SMALLEST = 2.0**-24  # positive float16
LAYOUTS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS)

BLOCKS: Mapping[str, BlockFormat] = MappingProxyType(  # by layout
    {
        each.layout.name: each
        for each in (
            BlockFormat(Q4_0, 18, (Bits(2, 4, 16),)),
            BlockFormat(Q4_1, 20, (Bits(4, 4, 16),), negates_minimums=True),
            BlockFormat(Q5_0, 22, (Bits(6, 4, 16), Bits(2, 1, 1))),
            BlockFormat(Q5_1, 24, (Bits(8, 4, 16), Bits(4, 1, 1)), negates_minimums=True),
            BlockFormat(Q8_0, 34, (Bits(2, 8, 32),), flipped=128),  # two's complement, plus 128
            BlockFormat(Q2_K, 84, (Bits(16, 2, 32),), scale=80, factors_in=Factors.Q2_K),
            BlockFormat(
                Q3_K,
                110,
                (Bits(32, 2, 32), Bits(0, 1, 32)),
                scale=108,
                factors=96,
                factors_in=Factors.Q3_K,
            ),
            BlockFormat(Q4_K, 144, (Bits(16, 4, 32),), factors=4, factors_in=Factors.Q4_K),
            BlockFormat(
                Q5_K, 176, (Bits(48, 4, 32), Bits(16, 1, 32)), factors=4, factors_in=Factors.Q4_K
            ),
            BlockFormat(Q6_K, 210, (Bits(0, 4, 64), Bits(128, 2, 32)), scale=208, factors=192),
            BlockFormat(IQ4_NL, 18, (Bits(2, 4, 16),)),
            BlockFormat(IQ4_XS, 136, (Bits(8, 4, 16),), factors=2, factors_in=Factors.IQ4_XS),
            BlockFormat(MXFP4, 17, (Bits(1, 4, 16),), has_exponents=True),
        )
    }
)


@dataclass(frozen=True, slots=True)
class _Floats(GroupedWeight):
    """Floats that are rounded to the layout where they are computed in it."""

    def dequantize(self) -> Tensor:
        return self.tensors[""]


def q8_0_weight(floats: Tensor) -> GroupedWeight:
    """Float32 `[out, in]` in Q8_0, exact where it is dequantized."""
    return _Floats(Q8_0, MappingProxyType({"": floats}), floats.shape[1], _in_q8_0)


def _in_q8_0(tensors: Mapping[str, Tensor]) -> Groups:
    """Each number is rounded to the nearest step of its group."""
    floats, largest = tensors[""], Q8_0.middle - 1
    groups = torch.nn.functional.pad(floats, (0, -floats.shape[1] % Q8_0.group))
    groups = groups.view(len(floats), -1, Q8_0.group)
    scales = (groups.abs().amax(dim=2) / largest).to(torch.float16)
    steps = groups / scales[:, :, None].float().clamp(min=SMALLEST)
    steps = steps.round_().clamp_(-largest, largest).add_(Q8_0.middle).to(torch.uint8)
    return Groups(steps.flatten(1), scales)
