"""Layers that all model families share. Everything works on `[tokens, hidden]`.

A layer is a frozen callable over its operators; only attention depends on which request a token
belongs to.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.ports import AllReduce, Linear, Norm, RankPart, RopeAngles, StepContext


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the low RoPE frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __call__(self, inverse: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inverse
        rotations = self.original_max_positions / wavelength
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0.0, 1.0)
        return (1 - share) * inverse / self.factor + share * inverse


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions divided by `factor`."""

    factor: float

    def __call__(self, inverse: Tensor) -> Tensor:
        return inverse / self.factor


@dataclass(frozen=True, slots=True)
class GivenScaling:
    """Each frequency divided by its own factor, `[dim / 2]`."""

    factors: tuple[float, ...]

    def __call__(self, inverse: Tensor) -> Tensor:
        return inverse / torch.tensor(self.factors)


def inverse_frequencies(
    dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """RoPE frequencies `[dim / 2]` in float32, fastest first."""
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return inverse if scaling is None else scaling(inverse)


def rope_angles(positions: Tensor, inverse: Tensor) -> RopeAngles:
    """RoPE angles at `positions` `[tokens]` from frequencies `inverse` `[dim / 2]`."""
    angles = positions.to(torch.float32)[:, None] * inverse
    return RopeAngles(angles.cos(), angles.sin())


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

    rows: Tensor  # [part, hidden]
    part: RankPart
    all_reduce: AllReduce | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        if self.all_reduce is None:
            return F.embedding(ids, self.rows)
        place = ids - self.part.run.start
        elsewhere = (place < 0) | (place >= len(self.part.run))
        hidden = F.embedding(place.masked_fill(elsewhere, 0), self.rows)
        hidden.masked_fill_(elsewhere[:, None], 0.0)
        self.all_reduce(hidden)
        return hidden


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(activation(up(x)))`; a gated one has gate and up fused into `up`."""

    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)), add_to)


class FeedForward(Protocol):
    """What follows attention in a layer: an `Mlp`, or a mixture of experts."""

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor:
        """`add_to` with the output added in place; both are `[tokens, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Fused q, k, v; optional norm of q and k per head (Qwen3); optional RoPE; output."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        """The attention output `[tokens, heads * dim]`, before `out`, which the caller applies."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.apply_(q)
            self.k_norm.apply_(k)
        return context.attention.run(self.layer, q, k, v, context.rope).view(len(x), -1)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm layer; adds to the residual stream in place."""

    attention_norm: Norm
    attention: AttentionBlock
    mlp_norm: Norm
    mlp: FeedForward

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Hidden states of `context.rows`; in `hidden` itself if all rows are needed."""
        heads, rows = self.attention(self.attention_norm(hidden), context), context.rows
        if rows is not None:
            hidden, heads = hidden.index_select(0, rows), heads.index_select(0, rows)
        self.attention.out(heads, hidden)
        return self.mlp(self.mlp_norm(hidden), hidden)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A pre-norm decoder or one stage of it.

    `tokens` and `learned_positions` are None except on the first stage, `norm` and `head` except
    on the last.
    """

    blocks: tuple[DecoderLayer, ...]
    tokens: Embedding | None = None
    learned_positions: Tensor | None = None  # [positions, hidden]
    inverse: Tensor | None = None  # RoPE frequencies, [dim / 2]
    norm: Norm | None = None
    head: Linear | None = None

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        assert self.tokens is not None, "only the first stage embeds"
        hidden = self.tokens(ids)
        if self.learned_positions is not None:
            hidden += F.embedding(positions, self.learned_positions)
        return hidden

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        return self.run_blocks(hidden, replace(context, rope=self.rope(context.positions)))

    def rope(self, positions: Tensor) -> RopeAngles | None:
        """The RoPE angles that all layers share; None for a model with learned positions."""
        return None if self.inverse is None else rope_angles(positions, self.inverse)

    def run_blocks(self, hidden: Tensor, context: StepContext) -> Tensor:
        """As `layers`, with the RoPE angles already in the context."""
        all_rows = context if context.rows is None else replace(context, rows=None)
        for block in self.blocks[:-1]:
            block(hidden, all_rows)
        return self.blocks[-1](hidden, context)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None, "only the last stage has a head"
        assert self.head is not None, "only the last stage has a head"
        return self.head(self.norm(hidden)).float()
