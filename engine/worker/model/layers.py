"""Layers that all model families share. Everything works on `[tokens, hidden]`.

A layer is a frozen callable over its operators; only attention depends on which request a token
belongs to.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.model.layer_inputs import LayerInput, StageInputs
from engine.worker.ports import AllReduce, Linear, Lookup, Norm, RankPart, RopeAngles, StepContext


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear split by columns over the ranks: the results of all ranks are summed."""

    part: Linear
    all_reduce: AllReduce

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = self.part(x)
        self.all_reduce(y)
        return y if add_to is None else add_to.add_(y)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Embeddings of the ids in `part`; with `all_reduce` the other ranks hold the other ids."""

    rows: Lookup  # [part, hidden]
    part: RankPart
    all_reduce: AllReduce | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        if self.all_reduce is None:
            return self.rows(ids)
        place = ids - self.part.run.start
        elsewhere = (place < 0) | (place >= len(self.part.run))
        hidden = self.rows(place.masked_fill(elsewhere, 0))
        hidden.masked_fill_(elsewhere[:, None], 0.0)
        self.all_reduce(hidden)
        return hidden


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(activation(up(x)))`; a gated one has gate and up fused into `up`."""

    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return self.down(self.activation(self.up(x)), add_to)


@dataclass(frozen=True, slots=True)
class NoMlp:
    """In place of the MLP of a layer that has none."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x) if add_to is None else add_to


class FeedForward(Protocol):
    """What follows attention in a layer: an `Mlp`, or a mixture of experts."""

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """`[tokens, hidden]`: a new tensor, or `add_to` with the output added in place."""


@dataclass(frozen=True, slots=True)
class WidthNorm:
    """A norm of all heads of q or k together, over `[heads * dim]` (OLMo 2)."""

    norm: Norm

    def apply_(self, heads: Tensor) -> None:
        tokens, count, dim = heads.shape
        self.norm.apply_(heads.view(tokens, 1, count * dim))


@dataclass(frozen=True, slots=True)
class SplitWidthNorm:
    """RMS norm over the heads of all ranks; each rank holds its own heads and their weights.

    `share` is what one rank's sum of squares counts for: less than 1 where several ranks hold the
    same KV heads. `size` is the number of elements over all ranks.
    """

    weight: Tensor  # [own heads * dim]
    eps: float
    size: int
    share: float
    all_reduce: AllReduce

    def apply_(self, heads: Tensor) -> None:
        squares = heads.float().square().sum(dim=(1, 2)) * self.share
        self.all_reduce(squares)
        factor = torch.rsqrt(squares / self.size + self.eps)[:, None, None]
        weight = self.weight.view(heads.shape[1:])
        heads.copy_((heads.float() * factor).to(heads.dtype) * weight)


class HeadNorm(Protocol):
    """A norm of q or k before RoPE."""

    def apply_(self, heads: Tensor) -> None:
        """Normalize `[tokens, heads, dim]` in place."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Fused q, k, v; optional norms of q and k; optional RoPE; output.

    `rope` is the index of this layer's angles in `StepContext.ropes`, None for a layer without
    RoPE. `sinks` are the scores of `AttentionOptions.has_sinks`. Without `has_own_kv` there is no k
    and v, and the KV of an earlier layer is read.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    out: Linear
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    rope: int | None = None
    sinks: Tensor | None = None  # [heads], float32
    v_norm: HeadNorm | None = None
    has_own_kv: bool = True

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        """The attention output `[tokens, heads * dim]`, before `out`, which the caller applies."""
        heads, kv_heads = self.num_heads, self.num_kv_heads if self.has_own_kv else 0
        return self.mix(self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim), context)

    def mix(self, qkv: Tensor, context: StepContext) -> Tensor:
        """The same from q, k and v, `[tokens, heads + 2 * kv_heads, dim]`."""
        heads, kv_heads = self.num_heads, self.num_kv_heads if self.has_own_kv else 0
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        for norm, part in ((self.q_norm, q), (self.k_norm, k), (self.v_norm, v)):
            if norm is not None:
                norm.apply_(part)
        rope = None if self.rope is None else context.ropes[self.rope]
        if not self.has_own_kv:
            found = context.attention.run(self.layer, q, None, None, rope, self.sinks)
            return found.view(len(qkv), -1)
        return context.attention.run(self.layer, q, k, v, rope, self.sinks).view(len(qkv), -1)


class Mixer(Protocol):
    """What mixes the tokens of a request: attention, or a recurrent layer."""

    @property
    def out(self) -> Linear:
        """The linear behind it, which the caller applies."""

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        """The inputs of `out`, `[tokens, width]`."""


@dataclass(frozen=True, slots=True)
class GatedAttentionBlock:
    """Attention whose output is multiplied by `sigmoid(gate)`, a gate for each of its elements.

    `inputs` is one linear of q and gate, head by head, of k and of v.
    """

    attention: AttentionBlock  # its `qkv` is not used
    inputs: Linear
    # A function of the `Operators`, as is `gate_heads_`
    without_gates: Callable[[Tensor, int], Tensor]
    gate_heads_: Callable[[Tensor, Tensor], None]

    @property
    def out(self) -> Linear:
        return self.attention.out

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        block = self.attention
        count = 2 * (block.num_heads + block.num_kv_heads)
        y = self.inputs(x).view(len(x), count, block.head_dim)
        mixed = block.mix(self.without_gates(y, block.num_heads), context)
        self.gate_heads_(mixed, y)
        return mixed


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, or a recurrent layer in its place, and MLP.

    Each adds its result to the residual stream in place.
    Norms before them are None in models that only have norms of their results (OLMo 2); norms of
    their results (`…_post_norm`) are None in most others, and Gemma has both.
    """

    attention_norm: Norm | None
    attention: Mixer
    mlp_norm: Norm | None
    mlp: FeedForward
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    input: LayerInput | None = None
    scale: Callable[[Tensor], Tensor] | None = None  # scales the residual stream in place

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Hidden states of `context.rows`; in `hidden` itself if all rows are needed."""
        x = hidden if self.attention_norm is None else self.attention_norm(hidden)
        heads, rows = self.attention(x, context), context.rows
        if rows is not None:
            hidden, heads = hidden.index_select(0, rows), heads.index_select(0, rows)
        if self.attention_post_norm is None:
            self.attention.out(heads, hidden)
        else:
            self.attention_post_norm(self.attention.out(heads), hidden)
        x = hidden if self.mlp_norm is None else self.mlp_norm(hidden)
        if self.mlp_post_norm is None:
            hidden = self.mlp(x, hidden)
        else:
            hidden = self.mlp_post_norm(self.mlp(x), hidden)
        if self.input is not None and context.layer_inputs is not None:
            hidden = self.input(hidden, context.layer_inputs, rows)
        return hidden if self.scale is None else self.scale(hidden)


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """Attention and MLP that read the same norm of the residual stream; both are added to it
    (Cohere)."""

    norm: Norm
    attention: Mixer
    mlp: FeedForward

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Hidden states of `context.rows`; in `hidden` itself if all rows are needed."""
        x = self.norm(hidden)
        heads, rows = self.attention(x, context), context.rows
        if rows is not None:
            hidden, heads, x = (each.index_select(0, rows) for each in (hidden, heads, x))
        self.attention.out(heads, hidden)
        return self.mlp(x, hidden)


class Layer(Protocol):
    """One layer of a `Decoder`."""

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Hidden states of `context.rows`; in `hidden` itself if all rows are needed."""


class ComputesAngles(Protocol):
    """One kind of RoPE."""

    def angles(self, positions: Tensor) -> RopeAngles:
        """The angles at `positions` `[tokens]`."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder or one stage of it.

    `tokens` and `learned_positions` are None except on the first stage, `norm` and `head` except
    on the last. Embeddings are multiplied by `embedding_scale`; logits are capped as attention
    scores are with a `soft_cap`.
    """

    blocks: tuple[Layer, ...]
    tokens: Embedding | None = None
    learned_positions: Tensor | None = None  # [positions, hidden]
    ropes: tuple[ComputesAngles, ...] = ()
    norm: Norm | None = None
    head: Linear | None = None
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    inputs: StageInputs | None = None

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        assert self.tokens is not None, "only the first stage embeds"
        hidden = self.tokens(ids)
        if self.embedding_scale != 1.0:
            hidden *= self.embedding_scale
        if self.learned_positions is not None:
            hidden += F.embedding(positions, self.learned_positions)
        return hidden

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        hidden, context = self.prepared(hidden, context)
        return self.sent(self.run_blocks(hidden, context), context)

    def prepared(self, hidden: Tensor, context: StepContext) -> tuple[Tensor, StepContext]:
        """Hidden states without the layer inputs that came with them, and the context with what
        all layers of this stage share: RoPE angles and layer inputs."""
        ropes, inputs = self.rope_angles(context.positions), None
        if self.inputs is not None:
            hidden, inputs = self.inputs.split(hidden, context.ids)
        return hidden, replace(context, ropes=ropes, layer_inputs=inputs)

    def sent(self, hidden: Tensor, context: StepContext) -> Tensor:
        """The hidden states, with the inputs of later stages' layers behind them."""
        if self.inputs is None or context.layer_inputs is None:
            return hidden
        return self.inputs.joined(hidden, context.layer_inputs)

    def rope_angles(self, positions: Tensor) -> tuple[RopeAngles, ...]:
        """The angles of each kind of RoPE that layers of this stage use."""
        return tuple(rope.angles(positions) for rope in self.ropes)

    def run_blocks(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Run blocks, like `layers`, with a prepared context."""
        all_rows = context if context.rows is None else replace(context, rows=None)
        for block, (rows, values) in zip(self.blocks, context.added, strict=False):
            block(hidden, all_rows)
            hidden.index_add_(0, rows, values)
        for block in self.blocks[len(context.added) : -1]:
            block(hidden, all_rows)
        return self.blocks[-1](hidden, context)

    def features(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None, "only the last stage has a final norm"
        return self.norm(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None, "only the last stage has a head"
        assert self.head is not None, "only the last stage has a head"
        logits = self.head(self.norm(hidden)).float()
        if self.logit_cap is not None:
            logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)
        return logits
