"""A recurrent layer between its linears and the states of a step."""

from dataclasses import dataclass

from torch import Tensor

from engine.worker.model.layers import HeadNorm
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
