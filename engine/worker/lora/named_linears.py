"""Of which tensors of the checkpoint each linear of a model is made.

Families build a model from a `WeightSource` and `Operators`. `NamedLinears` stands around both and
notes the tensors that come out of the one and go into a linear of the other, so families need not
know about LoRA.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

from torch import Tensor

from engine.worker.ports import (
    Activation,
    Experts,
    ExpertWeights,
    HeadLinear,
    HeadOperators,
    HeadTiles,
    Linear,
    LinearWeight,
    Operators,
    Routing,
    TensorSlice,
    WeightSource,
)

SUFFIX = ".weight"


class LinearPart(NamedTuple):
    """The share of one module of the checkpoint in a linear: some of its outputs and inputs.

    `module` is its name, such as "model.layers.0.self_attn.q_proj".
    """

    module: str
    sizes: tuple[int, int]  # the whole module's outputs and inputs
    rows: range
    columns: range
    tiles: HeadTiles | None = None  # the order of the linear's inputs, if it is not the module's
    is_transposed: bool = False  # whether the linear multiplies the transpose of these rows


class NamedLinear(NamedTuple):
    """A linear, and the modules whose outputs it computes side by side; linears of heads, and the
    share of each head in a module."""

    linear: Linear | HeadLinear
    parts: tuple[LinearPart, ...]
    is_of_heads: bool = False


class NamedLinears:
    """The linears that were built by its operators from weights of its source."""

    def __init__(self) -> None:
        self._weights: dict[int, tuple[LinearWeight, TensorSlice]] = {}  # not in a linear yet
        self._linears: dict[int, NamedLinear] = {}

    def source(self, weights: WeightSource) -> WeightSource:
        """The same weights."""
        return cast(WeightSource, _NotedSource(weights, self._weights))

    def operators(self, operators: Operators) -> Operators:
        """The same operators."""
        return cast(Operators, _NotedOperators(operators, self))

    def find(self, linear: object) -> NamedLinear | None:
        """The parts of a linear; None if its weights are not known by name."""
        return self._linears.get(id(linear))

    def forget_weights(self) -> None:
        """The weights that came from the source so far will be part of no linear."""
        self._weights.clear()

    def note(
        self,
        linear: Linear | HeadLinear,
        weights: Sequence[LinearWeight],
        *,
        is_of_heads: bool = False,
    ) -> None:
        """These weights are now those of `linear`."""
        found = [self._weights.pop(id(weight), None) for weight in weights]
        slices = [pair[1] for pair in found if pair is not None]
        if len(slices) == len(weights) and all(each.name.endswith(SUFFIX) for each in slices):
            parts = tuple(_part(each) for each in slices)
            self._linears[id(linear)] = NamedLinear(linear, parts, is_of_heads)


def _part(part: TensorSlice) -> LinearPart:
    outputs, inputs = part.shape
    rows, columns = part.ranges
    module = part.name.removesuffix(SUFFIX)
    if part.as_floats and part.is_transposed:
        return LinearPart(module, (inputs, outputs), columns, rows, is_transposed=True)
    return LinearPart(module, (outputs, inputs), rows, columns, part.tiles)


class _NotedSource:
    """A `WeightSource` whose weights are remembered until they are part of a linear."""

    def __init__(
        self, weights: WeightSource, noted: dict[int, tuple[LinearWeight, TensorSlice]]
    ) -> None:
        self._weights = weights
        self._noted = noted

    def __getattr__(self, name: str) -> object:
        return getattr(self._weights, name)

    def weight(self, part: TensorSlice) -> LinearWeight:
        weight = self._weights.weight(part)
        self._noted[id(weight)] = weight, part
        return weight


class _NotedHeads:
    """`HeadOperators` whose linears are remembered."""

    def __init__(self, heads: HeadOperators, named: NamedLinears) -> None:
        self._heads = heads
        self._named = named
        self.empty, self.copy = heads.empty, heads.copy

    def linear(self, weights: Sequence[LinearWeight]) -> HeadLinear:
        linear = self._heads.linear(weights)
        self._named.note(linear, weights, is_of_heads=True)
        return linear


class _NotedOperators:
    """`Operators` whose linears are remembered."""

    def __init__(self, operators: Operators, named: NamedLinears) -> None:
        self._operators = operators
        self._named = named
        self.heads = _NotedHeads(operators.heads, named)

    def __getattr__(self, name: str) -> object:
        return getattr(self._operators, name)

    def experts(
        self, experts: Sequence[ExpertWeights], routing: Routing, activation: Activation
    ) -> Experts:
        """Experts are no linears for LoRA: their weights are forgotten, so that they can be
        freed."""
        made = self._operators.experts(experts, routing, activation)
        self._named.forget_weights()
        return made

    def linear(self, weights: Sequence[LinearWeight], bias: Tensor | None) -> Linear:
        linear = self._operators.linear(weights, bias)
        self._named.note(linear, weights)
        return linear
