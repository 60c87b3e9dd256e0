"""What the data plane is put together from: families, attention backends, operators.

One worker holds one stage (a run of layers). Everything but attention works on
`[tokens, hidden]`, where tokens are those of all requests of the step, one after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.step import BlockMove, SamplingParams
from engine.worker.weights.int8_weight import Weight

if TYPE_CHECKING:
    from engine.worker.cpu.kernel_graph import KernelGraph
    from engine.worker.model.kv_tensors import KVTensors
    from engine.worker.model.layout import RaggedLayout
    from engine.worker.model.shard import Shard


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The facts of a checkpoint that the worker plans with.

    `inner_size` is the width of the MLP, `layer_parameters` the matrix elements of one layer.
    `window` is the sliding window of attention in tokens (itself included), None for all.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    inner_size: int
    layer_parameters: int
    vocab_size: int
    max_positions: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that may come: what is allocated once is sized for it."""

    max_requests: int
    max_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What all attention layers of a stage share. Scores are `q · k * scale`, in float32.

    `dtype` is that of q, k, v and of what the heads read; the cache may have another: what lies
    there times `k_scale` or `v_scale` is the key or value. Backends on a GPU need `limits`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    dtype: torch.dtype = torch.float32
    k_scale: float = 1.0
    v_scale: float = 1.0
    limits: StepLimits | None = None


class ThreadPool(Protocol):
    """The threads of a worker on the CPU; see `engine.worker.cpu.thread_pool`."""

    @property
    def threads(self) -> int: ...

    @property
    def tape(self) -> "KernelGraph | None":
        """What is being recorded; see `engine.worker.cpu.kernel_graph`."""
        ...

    def room(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for what a kernel makes. All that is passed to kernels is from here, except
        what outlives every step."""
        ...

    def run(self, kernel: int, operands: int, chunks: int) -> None:
        """Run `kernel(operands, chunk, thread)` for all chunks; both are addresses."""
        ...


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Cosine and sine of every token of a step, `[tokens, dim / 2]`; the same in all layers."""

    cos: Tensor
    sin: Tensor


class AttentionBackend(Protocol):
    """Attention over the paged cache; made as `Backend(spec, cache, team)`.

    `plan` is called once a step, `run` once a layer after it.
    """

    def plan(self, layout: "RaggedLayout") -> None: ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: RotaryAngles | None) -> Tensor:
        """Turn q and k, write k and v into their slots, attend; all `[tokens, heads, dim]`.

        `layer` counts within the stage. Each token sees its request's slots up to itself. The pairs
        that `turn` rotates are the halves of dim; None leaves q and k as they are. All three lie
        in one tensor, side by side in this order, and may be overwritten.
        """
        ...


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend that CUDA graphs can be captured of, for steps of decodes alone.

    There is one graph for each number of rows; steps are padded to it (`layout.padded`).
    """

    def plan_captured(self, layout: "RaggedLayout") -> None:
        """Before each warm-up, each capture and each replay with so many rows: as `plan`, but
        only addresses that are always the same for this number of rows are written and read."""
        ...

    def baked(self, num_rows: int) -> tuple[int, ...]:
        """What the last `plan_captured` decided that a graph cannot change."""
        ...


class MakesAttention(Protocol):
    """A class in the table of `adapters.attention`."""

    def __call__(
        self, spec: AttentionSpec, cache: "KVTensors", team: ThreadPool
    ) -> AttentionBackend: ...


class ChoosesShapes(MakesAttention, Protocol):
    """A class in that table that does not serve every device and shape."""

    def why_not(self, spec: AttentionSpec, kv_dtype: torch.dtype, block_size: int) -> str:
        """Called on the class: "" if it can serve, else one line to say before another is taken."""
        ...


class MovesBlocks(Protocol):
    """Copies KV blocks between the device and a host pool, around the compute of a step.

    On a GPU the pool is pinned and copies run on a stream of their own: moves that are awaited
    are made first, one after the other, and the compute stream waits for them by an event; the
    others run beside the compute. Moves of a step begin after the compute of the steps before it.
    """

    def moving(self, moves: Sequence[BlockMove]) -> AbstractContextManager[None]:
        """What is computed inside sees the awaited moves done; on leaving, all of them are."""
        ...


class Linear(Protocol):
    """`[tokens, in] -> [tokens, out]`."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """A new tensor, or `add_to` with the result added in place."""
        ...


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor `[tokens, hidden]`."""
        ...

    def apply_(self, heads: Tensor) -> None:
        """In place, `[tokens, heads, dim]`; heads lie side by side, tokens may be apart."""
        ...


class Argmax(NamedTuple):
    """`values` `[rows]`, no finite number where a row has NaN or infinity; lowest `ids`."""

    values: Tensor
    ids: Tensor


class Operators(Protocol):
    """What layers are made of, in the form that one kind of device runs fast."""

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> Linear:
        """From weights `[out, in]`, taken one below the other, and a bias for all rows.

        Several linears that read the same input become one. The weights may be views of a file;
        who needs them elsewhere copies them once. Rounded ones are used as they are, or
        expanded exactly where floats are computed.
        """
        ...

    def constant(self, tensor: Tensor) -> Tensor:
        """A small tensor that is computed with and not from the checkpoint, where steps read it."""
        ...

    def rms_norm(self, weight: Tensor, eps: float) -> Norm: ...

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> Norm: ...

    def activation(self, name: str, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
        """`act(x)`; gated: `act(left half of x) * right half`. Names are Hugging Face's."""
        ...

    def turn_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary positions in place on `[tokens, heads, dim]`; the halves of dim are the pairs.

        `cos` and `sin` are `[tokens, dim / 2]`.
        """
        ...

    def largest(self, logits: Tensor) -> Argmax:
        """The largest of each row of `[rows, vocab]` float32."""
        ...

    def draw(
        self,
        logits: Tensor,
        rows: Sequence[int],
        samplings: Sequence[SamplingParams],
        points: Sequence[float],
    ) -> list[int]:
        """One id for each of `rows`: temperature, min-p, top-k, top-p, then the id at `point`.

        `point` in [0, 1) is a place in the cumulative distribution by id. What the filters keep
        is said in `engine.worker.sampling.filters`.
        """
        ...


class WeightSource(Protocol):
    """The tensors of a checkpoint by name."""

    def has(self, name: str) -> bool: ...

    def take(
        self,
        name: str,
        *shape: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """The tensor in the worker's dtype, or some rows and columns of it; None: all.

        `shape` is the whole tensor's; raises `StartupError` if missing or misshapen.
        """
        ...

    def take_matrix(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        rows: range | None = None,
        columns: range | None = None,
        is_transposed: bool = False,
    ) -> Weight:
        """The same for the weight of a linear, `[out, in]`, which may be rounded already.

        `is_transposed`: it is stored as `[in, out]`; rows are outputs all the same.
        """
        ...

    def skip(self, name: str) -> None:
        """Count as taken what came from elsewhere."""
        ...


class StageModel(Protocol):
    """A shard: a run of layers, and of each a rank's part. `ids` and `positions` are int64
    `[tokens]`; hidden states are whole, and equal, on all ranks of a stage."""

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[tokens, hidden]`; only on the first stage."""
        ...

    def layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """All layers of this stage; may overwrite `hidden`.

        Only `rows` (int64) of the result are asked for, None for all: what the last layer would
        compute for other rows is left out.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, this rank's part of vocab]` in float32; only on the last stage."""
        ...


class ModelFamily(Protocol):
    """How one architecture is read and built; made as `Family(config)` from `config.json`.

    Both steps raise `StartupError` naming the field or tensor that they cannot serve.
    """

    @property
    def shape(self) -> ModelShape: ...

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Shell patterns of tensors in old checkpoints that carry no information."""
        ...

    def build(self, weights: WeightSource, shard: "Shard", operators: Operators) -> StageModel:
        """The layers of the shard, with embedding or head where they begin or end the model."""
        ...


class ReadsFamily(Protocol):
    """A class in the table of `adapters.models`."""

    def __call__(self, config: Mapping[str, object]) -> ModelFamily: ...
