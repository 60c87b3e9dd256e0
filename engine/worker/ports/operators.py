"""The operators that layers are made of, which each kind of device implements."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.step import SamplingParams
from engine.worker.ports.experts import Experts, ExpertWeights, Routing
from engine.worker.ports.recurrent import Recurrence, RecurrentWeights
from engine.worker.ports.weights import LinearWeight

Activation = Callable[[Tensor], Tensor]
NUM_LORA_SLOTS = 64


class Linear(Protocol):
    """`[tokens, in] -> [tokens, out]`."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """A new tensor, or `add_to` with the result added in place."""


class LowRankUp(NamedTuple):
    """A second factor of a LoRA adapter: from some of the ranks to some columns of a linear."""

    ranks: slice  # rows of the first factor
    columns: slice  # columns of the linear's output
    weight: Tensor  # [columns, ranks], with the adapter's scale


class LowRank(Protocol):
    """What a LoRA adapter adds to one linear, in floats whatever the format of the linear."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Add to `y` `[tokens, out]`, the linear's output of `x` `[tokens, in]`, in place."""


class SlottedLoras(Protocol):
    """What the adapters in `NUM_LORA_SLOTS` slots add to one linear, each row's slot being read
    from the device's memory."""

    def put(self, slot: int, lora: LowRank | None) -> None:
        """Replace an adapter, which no step in flight may use."""

    def __call__(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        """Add to `y` `[tokens, out]` in place, as `LowRank` does; `slots` are int64 `[tokens]`, a
        negative one for no adapter."""


class LoraOperators(Protocol):
    """What LoRA adapters are made of."""

    def low_rank(self, down: Tensor, ups: Sequence[LowRankUp]) -> LowRank:
        """A LoRA adapter's share of a linear: `ups` read the product with `down` `[ranks, in]`.

        The tensors are float32 on the host; they are copied to where steps read them.
        """

    def slots(self, widths: Sequence[int]) -> SlottedLoras | None:
        """The slots of a linear whose outputs are parts of these widths; None if no steps with
        adapters are captured."""


class HeadLinear(Protocol):
    """A linear of its own for each head, all of one shape."""

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Write to `y` `[tokens, heads, out]` the results of `x` `[tokens, heads, in]`. Both may be
        some columns of wider tensors."""


class HeadOperators(Protocol):
    """What computes heads one by one, `[tokens, heads, dim]`."""

    def linear(self, weights: Sequence[LinearWeight]) -> HeadLinear:
        """The linears of a weight `[out, in]` of each head, used as `Operators.linear` does."""

    def empty(self, kind: str, like: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Memory for a result, in the dtype and on the device of `like`. The next result of the
        same `kind` may lie there."""

    def copy(self, x: Tensor, y: Tensor, pairs: int) -> None:
        """Copy `x` to `y`. The first `2 * pairs` dimensions of a head are pairs of neighbours in
        `x`, of which `y` has the first ones and then the second ones."""


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """A new tensor `[tokens, hidden]`, or `add_to` with the result added in place."""

    def apply_(self, heads: Tensor) -> None:
        """Normalize `[tokens, heads, dim]` in place; heads are adjacent, tokens may be strided."""


class Argmax(NamedTuple):
    """The largest value of each row, `[rows]`, and its lowest id.

    `values` is not finite for a row that has NaN or infinity.
    """

    values: Tensor
    ids: Tensor


class Draw(NamedTuple):
    """A row of logits from which an id is sampled."""

    row: int
    sampling: SamplingParams
    point: float  # in [0, 1), a place in the cumulative distribution by id


class SamplingOperators(Protocol):
    """What a sampler computes from logits `[rows, vocab]` in float32."""

    def argmax(self, logits: Tensor) -> Argmax:
        """The largest of each row."""

    def argmax_of(self, logits: Tensor, rows: Tensor) -> Argmax:
        """The largest of each of these rows, in which ids may have minus infinity."""

    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        """Set the logits of ids that are not allowed to minus infinity. `allowed` is uint8 `[rows,
        vocab / 8]`, with a bit for each id of these rows, the first id in the lowest bit."""

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """One id (int64) for each draw: temperature, min-p, top-k, top-p, then the id at its point.
        What the filters keep is defined in `engine.worker.sampling.filters`."""


class Operators(Protocol):
    """Makes layers in the form that one kind of device runs fast."""

    def linear(self, weights: Sequence[LinearWeight], bias: Tensor | None) -> Linear:
        """One linear from weights `[out, in]` stacked along out, and a bias for all outputs.

        Linears that read the same input are fused into one. The weights may be views of a mapped
        file; a device that needs another memory layout copies them once. Quantized weights are
        used as they are where the device has a linear for their format, else dequantized.
        """

    def experts(
        self, experts: Sequence[ExpertWeights], routing: Routing, activation: Activation
    ) -> Experts:
        """The experts of one layer; `activation` is a gated one of these operators.

        All experts have the same sizes. Weights are used as `linear` describes.
        """

    def constant(self, tensor: Tensor) -> Tensor:
        """A small computed tensor, on the device where steps read it."""

    def rms_norm(self, weight: Tensor, eps: float) -> Norm: ...

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> Norm: ...

    def activation(self, name: str, *, is_gated: bool) -> Activation:
        """`act(x)`; gated: `act(left half of x) * right half`. Names are Hugging Face's."""

    def clamped_swiglu(self, alpha: float, limit: float) -> Callable[[Tensor], Tensor]:
        """gpt-oss' gate: with g the left half of x, at most `limit`, and u the right half, between
        `-limit` and `limit`, it is `g * sigmoid(alpha * g) * (u + 1)`."""

    def gate(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """`act(x) * by` of two tensors `[tokens, width]`; the rows of `by` may be strided."""

    def scale(self, factor: float) -> Callable[[Tensor], Tensor]:
        """`x * factor` in place on `[tokens, hidden]`; returns x."""

    def gate_rows_(self, x: Tensor, scores: Tensor) -> None:
        """Multiply each row of `x` `[tokens, width]` by the sigmoid of its score `[tokens, 1]`."""

    def without_gates(self, y: Tensor, heads: int) -> Tensor:
        """The first of each of `heads` pairs of rows of `y` `[tokens, 2 * heads + n, dim]`, and the
        last n: a new tensor `[tokens, heads + n, dim]`. The second of a pair is its gate."""

    def gate_heads_(self, x: Tensor, y: Tensor) -> None:
        """Multiply the heads in `x` `[tokens, heads * dim]` by the sigmoids of their gates in `y`,
        of which `without_gates` tells the form."""

    def apply_rope_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """RoPE in place on `[tokens, heads, dim]`; pairs are made of the two halves of dim.

        `cos` and `sin` are `[tokens, dim / 2]`.
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of some tokens over all of one image: `[tokens, heads, dim]` from q of that
        form and k and v `[all tokens, heads, dim]`. A token's result is the same bits whatever
        other tokens there are in q."""

    def recurrence(self, weights: RecurrentWeights) -> Recurrence:
        """The part of a recurrent layer between its linears."""

    @property
    def sampling(self) -> SamplingOperators: ...

    @property
    def heads(self) -> HeadOperators: ...

    @property
    def loras(self) -> LoraOperators: ...
