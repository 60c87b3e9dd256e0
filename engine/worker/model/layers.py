"""Layers that all model families share. Everything works on `[tokens, hidden]`.

A layer is a frozen callable over its operators; only attention knows of requests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.model.shard import AddUp, RankPart
from engine.worker.ports import AttentionBackend, Linear, Norm, RotaryAngles


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretch of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __call__(self, inverse: Tensor) -> Tensor:
        wavelength = 2 * math.pi / inverse
        turns = self.original_max_positions / wavelength
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
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
    """Each frequency divided by a factor of its own, `[dim / 2]`."""

    factors: tuple[float, ...]

    def __call__(self, inverse: Tensor) -> Tensor:
        return inverse / torch.tensor(self.factors)


def inverse_frequencies(
    dim: int, theta: float, scaling: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Rotary frequencies `[dim / 2]` in float32, fastest first."""
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return inverse if scaling is None else scaling(inverse)


def rotary_angles(positions: Tensor, inverse: Tensor) -> RotaryAngles:
    """The turn of tokens at `positions` `[tokens]` with frequencies `inverse` `[dim / 2]`."""
    angles = positions.to(torch.float32)[:, None] * inverse
    return RotaryAngles(angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True)
class Added:
    """A linear of which each rank holds some columns: the ranks' results are added up."""

    part: Linear
    add_up: AddUp

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = self.part(x)
        self.add_up(y)
        return y if add_to is None else add_to.add_(y)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of the ids in `part`; with `add_up` the other ranks have those of the others."""

    rows: Tensor  # [part, hidden]
    part: RankPart
    add_up: AddUp | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        if self.add_up is None:
            return F.embedding(ids, self.rows)
        place = ids - self.part.run.start
        elsewhere = (place < 0) | (place >= len(self.part.run))
        hidden = F.embedding(place.masked_fill(elsewhere, 0), self.rows)
        hidden.masked_fill_(elsewhere[:, None], 0.0)
        self.add_up(hidden)
        return hidden


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(activation(up(x)))`; a gated one has gate and up fused into `up`."""

    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, add_to: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)), add_to)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Fused q, k, v; optional norm of q and k per head (Qwen3); optional rotary; output."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(self, x: Tensor, turn: RotaryAngles | None, attention: AttentionBackend) -> Tensor:
        """What the heads read, `[tokens, heads * dim]`; `out` is left to the caller."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, self.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.apply_(q)
            self.k_norm.apply_(k)
        return attention.run(self.layer, q, k, v, turn).view(len(x), -1)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One pre-norm layer; adds to the residual stream in place."""

    attention_norm: Norm
    attention: AttentionBlock
    mlp_norm: Norm
    mlp: Mlp

    def __call__(
        self,
        hidden: Tensor,
        turn: RotaryAngles | None,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of `rows`, None for all; `hidden` itself where it can be."""
        read = self.attention(self.attention_norm(hidden), turn, attention)
        if rows is not None:
            hidden, read = hidden.index_select(0, rows), read.index_select(0, rows)
        self.attention.out(read, hidden)
        return self.mlp(self.mlp_norm(hidden), hidden)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A pre-norm decoder or a stage of one: what the first or last stage has may be None."""

    blocks: tuple[DecoderLayer, ...]
    tokens: Embedding | None = None
    learned_positions: Tensor | None = None  # [positions, hidden]
    inverse: Tensor | None = None  # rotary frequencies, [dim / 2]
    norm: Norm | None = None
    head: Linear | None = None

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See `StageModel`."""
        assert self.tokens is not None, "only the first stage embeds"
        hidden = self.tokens(ids)
        if self.learned_positions is not None:
            hidden += F.embedding(positions, self.learned_positions)
        return hidden

    def layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `StageModel`."""
        return self.through(hidden, self.turn(positions), attention, rows)

    def turn(self, positions: Tensor) -> RotaryAngles | None:
        """What the rotary heads of all layers are turned by."""
        return None if self.inverse is None else rotary_angles(positions, self.inverse)

    def through(
        self,
        hidden: Tensor,
        turn: RotaryAngles | None,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Through all blocks, as `layers`."""
        for block in self.blocks[:-1]:
            block(hidden, turn, attention)
        return self.blocks[-1](hidden, turn, attention, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `StageModel`."""
        assert self.norm is not None, "only the last stage has a head"
        assert self.head is not None, "only the last stage has a head"
        return self.head(self.norm(hidden)).float()
