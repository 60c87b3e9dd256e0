"""Gated DeltaNet (Yang et al., arXiv:2412.06464), the recurrent layer of Qwen3-Next and Qwen3.5.

The state of a head is a matrix S `[key_dim, value_dim]`. With the decay g, the learning rate b and
unit-length q and k, each token changes it and reads it:

    S = g S + k (b (v - g kᵀS))ᵀ,    output = qᵀS

A run of tokens is computed in chunks of `CHUNK` as products of matrices (section 3.3 of
arXiv:2406.06484, with decays): within a chunk the corrections of all tokens are the solution of a
triangular system. All is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.step import NO_STATE
from engine.worker.ports import (
    DeltaStep,
    Linear,
    RecurrentShape,
    RecurrentState,
    StateRun,
    StepContext,
)

CHUNK = 64  # tokens
UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What the delta rule reads, for `tokens` tokens of one request and all value heads."""

    q: Tensor  # [heads, tokens, key_dim], of unit length times key_dim ** -0.5
    k: Tensor  # [heads, tokens, key_dim], of unit length
    v: Tensor  # [heads, tokens, value_dim]
    log_decay: Tensor  # [heads, tokens]
    rate: Tensor  # [heads, tokens]

    def tokens(self, first: int, last: int) -> "DeltaInputs":
        """Those of some tokens."""
        every = (self.q, self.k, self.v, self.log_decay, self.rate)
        return DeltaInputs(*(each[:, first:last] for each in every))


def delta_run(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """Any number of tokens: the outputs `[heads, tokens, value_dim]`. `state` is updated in
    place."""
    count = inputs.q.shape[1]
    starts = range(0, count, CHUNK)
    parts = [_delta_chunk(inputs.tokens(start, start + CHUNK), state) for start in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _delta_chunk(inputs: DeltaInputs, state: Tensor) -> Tensor:
    """At most `CHUNK` tokens. Row i of a matrix belongs to token i of the chunk."""
    q, k, count = inputs.q, inputs.k, inputs.q.shape[1]
    total = inputs.log_decay.cumsum(dim=1)  # the logarithm of the decay up to each token
    later = torch.ones(count, count, dtype=torch.bool).triu_(1)
    between = (total[:, :, None] - total[:, None, :]).masked_fill_(later, -torch.inf).exp_()
    rate, decay = inputs.rate[:, :, None], total.exp()[:, :, None]
    overlap = torch.bmm(k * rate, k.transpose(1, 2)).mul_(between)
    # The corrections: rate * (v - what the state and the tokens before predict for k).
    known = inputs.v * rate - torch.bmm(k * (rate * decay), state)
    update = torch.linalg.solve_triangular(overlap, known, upper=False, unitriangular=True)
    within = torch.bmm(q, k.transpose(1, 2)).mul_(between)
    output = torch.bmm(q * decay, state).baddbmm_(within, update)
    last = (total[:, -1:] - total).exp()[:, :, None]
    state.mul_(decay[:, -1:]).baddbmm_((k * last).transpose(1, 2), update)
    return output


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The recurrent layer, up to the linear `out`, which the caller applies.

    `inputs` is one linear of q, k, v, the gate z, b and a. `layer` counts the recurrent layers of
    the stage.
    """

    layer: int
    shape: RecurrentShape  # of this rank
    inputs: Linear
    conv: Tensor  # [channels, kernel]
    decay_rate: Tensor  # [value_heads], negative
    decay_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float
    out: Linear
    delta_steps: Callable[[DeltaStep], Tensor]

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        """`[tokens, value_heads * value_dim]` of this rank."""
        states, shape = context.states, self.shape
        assert states is not None, "a model with recurrent layers has states"
        heads, width = shape.num_value_heads, shape.num_value_heads * shape.value_dim
        qkv, gate, b, a = torch.split(self.inputs(x), [shape.channels, width, heads, heads], dim=1)
        log_decay = self.decay_rate * F.softplus(a + self.decay_bias)
        rate, mixed = b.sigmoid(), torch.empty(len(x), heads, shape.value_dim)
        state, count = states.layers[self.layer], len(states.decodes)
        for run in states.decodes:
            _begin(run, state)
        if count:
            conv = self._convolve_each(qkv[:count], state.inputs, states.decode_slots)
            q, k, v = (each.transpose(0, 1).contiguous() for each in self._heads(conv))
            slots, decay = states.decode_slots, log_decay[:count].exp()
            step = DeltaStep(q, k, v, decay, rate[:count].contiguous(), state.matrices, slots)
            mixed[:count] = self.delta_steps(step)
        for run in states.runs:
            _begin(run, state)
            rows = slice(run.first, run.last)
            if run.first < run.last:
                conv = self._convolve(qkv[rows], state.inputs[run.slot])
                inputs = DeltaInputs(*self._heads(conv), log_decay[rows].t(), rate[rows].t())
                mixed[rows] = delta_run(inputs, state.matrices[run.slot]).transpose(0, 1)
        scale = torch.rsqrt(mixed.square().mean(dim=2, keepdim=True) + self.eps)
        mixed = mixed.mul_(scale).mul_(self.norm).view(len(x), width)
        return mixed.mul_(F.silu(gate))

    def _convolve(self, x: Tensor, before: Tensor) -> Tensor:
        """The causal convolution of each channel of `x` `[tokens, channels]`, then SiLU. `before`
        `[channels, kernel - 1]` are the inputs before, and is updated in place."""
        padded = torch.cat((before, x.t()), dim=1)
        before.copy_(padded[:, -before.shape[1] :])
        mixed = F.conv1d(padded[None], self.conv[:, None], groups=len(self.conv))
        return F.silu(mixed[0].t())

    def _convolve_each(self, x: Tensor, before: Tensor, slots: Tensor) -> Tensor:
        """The same for one token of each of several requests, whose inputs before are in `slots`
        of `before`."""
        padded = torch.cat((before[slots], x[:, :, None]), dim=2)
        before[slots] = padded[:, :, 1:]
        return F.silu((padded * self.conv).sum(dim=2))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all value heads, `[heads, tokens, dim]` each."""
        shape = self.shape
        keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
        q, k, v = torch.split(qkv, [keys, keys, values], dim=1)
        v = v.reshape(len(v), shape.num_value_heads, shape.value_dim).transpose(0, 1)
        return self._units(q).mul_(shape.key_dim**-0.5), self._units(k), v

    def _units(self, x: Tensor) -> Tensor:
        """Vectors of unit length, `[value_heads, tokens, key_dim]`."""
        shape = self.shape
        x = x.reshape(len(x), shape.num_key_heads, shape.key_dim).transpose(0, 1)
        x = x * torch.rsqrt(x.square().sum(dim=2, keepdim=True) + UNIT_EPS)
        return x.repeat_interleave(shape.num_value_heads // shape.num_key_heads, dim=0)


def _begin(run: StateRun, state: RecurrentState) -> None:
    """Bring the state before the run into its slot."""
    for part in state:
        if run.source == NO_STATE:
            part[run.slot].zero_()
        elif run.source != run.slot:
            part[run.slot].copy_(part[run.source])
