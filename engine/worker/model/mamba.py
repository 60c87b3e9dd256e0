"""Mamba 2 (Dao & Gu, arXiv:2405.21060), the recurrent layer of Granite 4.

The state of a head is a matrix S `[key_dim, value_dim]`. With the time step t of a head and its
rate a, which is negative, each token changes it and reads it:

    S = exp(a t) S + B (t x)ᵀ,    output = (Cᵀ S + D x) silu(z)

All is float32, and tokens are computed one after the other: the form of matrix products over chunks
of tokens (section 6) gives other bits, which depend on where a prompt is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.step import NO_STATE
from engine.worker.model.short_conv import convolved
from engine.worker.ports import MambaWeights, Norm, StateRuns


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
