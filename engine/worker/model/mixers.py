"""Mixers with a recurrent layer, between its linears and the states of a step; and attention beside
one, whose results are added (Falcon-H1)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.model.layers import HeadNorm, Mixer
from engine.worker.ports import Linear, Recurrence, StepContext


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """A `Mixer`: what a `Recurrence` makes of one linear, and a norm behind it.

    `layer` counts the recurrent layers of the stage. What `inputs` computes is multiplied by
    `scales` (Falcon-H1).
    """

    layer: int
    inputs: Linear
    recurrence: Recurrence
    out: Linear
    norm: HeadNorm | None = None
    scales: Tensor | None = None

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        """The inputs of `out` of this rank."""
        states = context.states
        assert states is not None, "a model with recurrent layers has states"
        y = self.inputs(x)
        if self.scales is not None:
            y.mul_(self.scales)
        mixed = self.recurrence(y, states.layers[self.layer], states.runs)
        if self.norm is not None:
            self.norm.apply_(mixed[:, None])
        return mixed


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
