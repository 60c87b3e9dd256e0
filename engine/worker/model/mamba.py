"""Mamba 2 (Dao & Gu, arXiv:2405.21060), the recurrent layer of Granite 4.

The state of a head is a matrix S `[key_dim, value_dim]`. With the time step t of a head and its
rate a, which is negative, each token changes it and reads it:

    S = exp(a t) S + B (t x)ᵀ,    output = (Cᵀ S + D x) silu(z)

All is float32, and tokens are computed one after the other: the form of matrix products over chunks
of tokens (section 6) gives other bits, which depend on where a prompt is cut.

Gated DeltaNet (Yang et al., arXiv:2412.06464), the recurrent layer of Qwen3-Next and Qwen3.5.

The state of a head is a matrix S `[key_dim, value_dim]`. With the decay g, the learning rate b and
unit-length q and k, each token changes it and reads it:

    S = g S + k (b (v - g kᵀS))ᵀ,    output = qᵀS

All is float32, and tokens are computed one after the other: a form of matrix products over chunks
of tokens (section 3.3 of arXiv:2406.06484) gives other bits, which depend on where a prompt is cut.
So a request that is computed anew, or with drafts, continues as it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.step import NO_STATE
from engine.worker.model.short_conv import convolved
from engine.worker.ports import DeltaWeights, MambaWeights, Norm, StateRuns


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """A norm of each group of the outputs, times weights of their own."""

    norm: Norm  # the norm of one group
    weight: Tensor  # [groups, width of one]

    def apply_(self, heads: Tensor) -> None:
        """Change `[tokens, 1, groups * width]` in place."""
        groups = heads.view(len(heads), *self.weight.shape)
        self.norm.apply_(groups)
        groups.mul_(self.weight)


@dataclass(frozen=True, slots=True)
class TorchMambaScan:
    """The `Recurrence` in plain torch, in float32. It returns the dtype of its inputs."""

    weights: MambaWeights

    def __call__(self, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns) -> Tensor:
        weights, shape, dtype = self.weights, self.weights.shape, y.dtype
        known_inputs, known_matrices = state
        y = y.float()
        heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim
        inputs, gate, steps = torch.split(y, [shape.channels, width, heads], dim=1)
        inputs = convolved(inputs, weights, known_inputs, runs)
        mixed, writes = y.new_empty(len(y), heads, shape.value_dim), runs.writes.tolist()
        for first, last, source in runs.runs.tolist():
            known = known_matrices[source]
            matrices = known.clone() if source != NO_STATE else torch.zeros_like(known)
            for row in range(first, last):
                c, b, x = self._heads(F.silu(inputs[row]))
                step = F.softplus(steps[row] + weights.decay_bias)
                matrices = matrices * (weights.decay_rate * step).exp()[:, None, None]
                matrices = matrices + b[:, :, None] * (step[:, None] * x)[:, None]
                read = torch.einsum("hk,hkv->hv", c, matrices) + weights.skip[:, None] * x
                mixed[row] = read * F.silu(gate[row]).view_as(read)
                for slot in writes[row]:
                    if slot != NO_STATE:
                        known_matrices[slot] = matrices
        return mixed.view(len(y), width).to(dtype)

    def _heads(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C, B and x of all heads of a row, `[heads, dim]` each."""
        shape = self.weights.shape
        keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
        c, b, x = torch.split(inputs, [keys, keys, values])
        per_group = shape.num_value_heads // shape.num_key_heads
        c, b = (each.view(-1, shape.key_dim).repeat_interleave(per_group, dim=0) for each in (c, b))
        return c, b, x.view(-1, shape.value_dim)


UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TorchDeltaNet:
    """The `Recurrence` in plain torch, in float32. It returns the dtype of its inputs."""

    weights: DeltaWeights

    def __call__(self, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns) -> Tensor:
        weights, shape, dtype = self.weights, self.weights.shape, y.dtype
        y = y.float()
        heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim
        qkv, gate, b, a = torch.split(y, [shape.channels, width, heads, heads], dim=1)
        decay = (weights.decay_rate * F.softplus(a + weights.decay_bias)).exp()
        rate, writes = b.sigmoid(), runs.writes.tolist()
        mixed = y.new_empty(len(y), heads, shape.value_dim)
        for first, last, source in runs.runs.tolist():
            inputs, matrices = (
                part[source].clone() if source != NO_STATE else torch.zeros_like(part[0])
                for part in state
            )
            for row in range(first, last):
                known = torch.cat((inputs, qkv[row : row + 1]))
                inputs = known[1:]
                q, k, v = self._heads(F.silu((known * weights.conv.t()).sum(dim=0)))
                matrices = matrices * decay[row, :, None, None]
                update = (v - torch.einsum("hk,hkv->hv", k, matrices)) * rate[row, :, None]
                matrices = matrices + k[:, :, None] * update[:, None]
                mixed[row] = torch.einsum("hk,hkv->hv", q, matrices)
                for slot in writes[row]:
                    if slot != NO_STATE:
                        state[0][slot], state[1][slot] = inputs, matrices
        scale = torch.rsqrt(mixed.square().mean(dim=2, keepdim=True) + weights.eps)
        mixed = mixed.mul_(scale).mul_(weights.norm).view(len(y), width)
        mixed = mixed.mul_(F.silu(gate)).to(dtype)
        return mixed if shape.tiles is None else shape.tiles.tiled(mixed)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all value heads of a row, `[heads, dim]` each."""
        shape = self.weights.shape
        keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
        q, k, v = torch.split(qkv, [keys, keys, values])
        v = v.view(shape.num_value_heads, shape.value_dim)
        return self._units(q) * shape.key_dim**-0.5, self._units(k), v

    def _units(self, x: Tensor) -> Tensor:
        """Vectors of unit length, `[value_heads, key_dim]`."""
        shape = self.weights.shape
        x = x.view(shape.num_key_heads, shape.key_dim)
        x = x * torch.rsqrt(x.square().sum(dim=1, keepdim=True) + UNIT_EPS)
        return x.repeat_interleave(shape.num_value_heads // shape.num_key_heads, dim=0)
