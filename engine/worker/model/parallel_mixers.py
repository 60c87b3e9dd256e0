"""Attention and a recurrent layer that read the same hidden states and whose results are added
(Falcon-H1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.model.layers import Mixer
from engine.worker.ports import Linear, StepContext


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """The sum of several linears, each of some columns of `[tokens, widths]`."""

    linears: tuple[Linear, ...]
    widths: tuple[int, ...]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        for linear, part in zip(
            self.linears, torch.split(x, list(self.widths), dim=1), strict=True
        ):
            add_to = linear(part.contiguous(), add_to)
        assert add_to is not None, "there is a linear"
        return add_to


@dataclass(frozen=True, slots=True)
class ParallelMixers:
    """A `Mixer` of several, of which each has `widths` columns of what it returns; these are
    multiplied by `scales`."""

    mixers: tuple[Mixer, ...]
    widths: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def out(self) -> JoinedLinear:
        return JoinedLinear(tuple([mixer.out for mixer in self.mixers]), self.widths)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        """`[tokens, sum of widths]`."""
        found = zip(self.mixers, self.scales, strict=True)
        return torch.cat([mixer(x, context) * scale for mixer, scale in found], dim=1)


@dataclass(frozen=True, slots=True)
class ScaledGate:
    """The activation of a gated MLP whose gate and result have multipliers."""

    activation: Callable[[Tensor], Tensor]
    gate: float
    result: float

    def __call__(self, x: Tensor) -> Tensor:
        x[:, : x.shape[1] // 2].mul_(self.gate)
        return self.activation(x).mul_(self.result)
