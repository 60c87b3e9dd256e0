"""A mixture of experts: which experts each token uses, their weights, and what computes them."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.worker.ports.weights import LinearWeight


class ExpertGroups(NamedTuple):
    """Neighbouring experts are a group; a token's experts are in the `top_k` groups in which the
    `num_best` best experts have the largest sum of what experts are chosen by."""

    num_groups: int
    top_k: int  # not more than a token has experts
    num_best: int


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token uses the `top_k` experts with the largest router logits.

    An expert's output is multiplied by its probability, the softmax over the logits of all experts;
    with `renormalizes` the probabilities of the chosen ones are divided by their sum. With `scales`
    they are then multiplied by the experts' own (Gemma 4). With `has_sigmoids` probabilities are
    the sigmoids of logits (GLM-4.5). With a `bias` the chosen experts have the largest sums of
    probability and bias. With `groups` they are chosen among those of some groups (DeepSeek).
    """

    top_k: int
    renormalizes: bool
    scales: Tensor | None = field(default=None, compare=False)  # [experts], float32
    bias: Tensor | None = field(default=None, compare=False)  # [experts], float32
    has_sigmoids: bool = False
    groups: ExpertGroups | None = None


class ExpertWeights(NamedTuple):
    """The gated MLP of one expert: gate and up `[inner, hidden]`, down `[hidden, inner]`.

    `up_bias` is that of gate and up, one after the other: `[2 * inner]`.
    """

    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Experts(Protocol):
    """The experts of one layer."""

    def __call__(self, x: Tensor, logits: Tensor, add_to: Tensor | None = None) -> Tensor:
        """The weighted sum of the chosen experts' outputs, `[tokens, hidden]`.

        `logits` are the router's, `[tokens, experts]`. The result is a new tensor, or `add_to` with
        the sum added in place.
        """
