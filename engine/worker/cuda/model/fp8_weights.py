"""Linear layers on a GPU with the fp8 weights of checkpoints, as they are stored.

A weight with one scale per output channel is multiplied in 8 bits where the GPU does so
(`EightBitLinear`). For scales of blocks, and on other GPUs, activations stay in 16 bits: up to 256
rows our kernel reads the weight in 8 bits; for more rows, whose product takes longer than reading
the weight, torch widens it and multiplies 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.worker.cuda.kernels.reference import FP8
from engine.worker.cuda.kernels.tiling import FIXED_FP8, Tiling, fp8_weight_tiling
from engine.worker.cuda.model.linears import PLAIN, FastProducts, FloatLinear
from engine.worker.ports import Weight
from engine.worker.weights.formats.fp8 import Fp8Weight

HALVES = (torch.bfloat16, torch.float16)  # what the kernel multiplies with


@dataclass(frozen=True, slots=True)
class Fp8WeightLinear:
    """A weight in fp8, activations in 16 bits."""

    weight: Fp8Weight
    bias: Tensor | None
    fast: FastProducts = PLAIN

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, added to `add_to` if given; accumulated in float32."""
        kernels, tiling = self.fast.fp8_weights, self._tiling(len(x))
        if kernels is not None and tiling is not None and x.dtype in HALVES:
            weight = self.weight
            found: Tensor = kernels.product(
                x, weight.values, weight.scales, weight.run, tiling, self.bias, add_to
            )
            return found
        return FloatLinear(self.widened(x.dtype), self.bias, self.fast)(x, add_to)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weight in floats, each rounded once."""
        values, scales, run = self.weight
        found = values.to(dtype)
        for at in range(scales.shape[1]) if values.shape[1] % run else ():
            found[:, at * run : (at + 1) * run] *= scales[:, at : at + 1]
        if values.shape[1] % run == 0:
            found.view(len(found), -1, run).mul_(scales[:, :, None])
        return found

    def _tiling(self, rows: int) -> Tiling | None:
        """None: the product is torch's."""
        kernels, (outputs, width) = self.fast.fp8_weights, self.weight.shape
        tiling = fp8_weight_tiling(rows, outputs)
        if self.fast.is_batch_invariant:
            tiling = FIXED_FP8
        if kernels is None or tiling is None:
            return None
        inner = kernels.inner_tile(self.weight.run, width, tiling.block_k)
        return replace(tiling, block_k=inner) if inner else None


def stacked_fp8(weights: Sequence[Weight]) -> Fp8Weight | None:
    """One weight of weights whose scales have equal runs; None if they differ or are no fp8."""
    found = [each for each in weights if isinstance(each, Fp8Weight)]
    if len(found) < len(weights) or len({each.run for each in found}) > 1:
        return None
    # torch.cat does not know 8-bit floats
    values = torch.cat([each.values.view(torch.uint8) for each in found]).view(FP8)
    return Fp8Weight(values, torch.cat([each.scales for each in found]), found[0].run)
