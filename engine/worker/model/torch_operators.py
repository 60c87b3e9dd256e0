"""The operators in plain torch: correct on every device, tuned for none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.model.experts import TorchExperts
from engine.worker.model.mamba import TorchDeltaNet, TorchMambaScan
from engine.worker.model.short_conv import TorchShortConv
from engine.worker.ports import (
    Activation,
    Argmax,
    ConvWeights,
    Draw,
    Experts,
    ExpertWeights,
    HeadLinear,
    HeadOperators,
    Linear,
    LinearWeight,
    LoraOperators,
    LowRankUp,
    MambaWeights,
    Norm,
    Recurrence,
    RecurrentWeights,
    Routing,
    SamplingOperators,
    SlottedLoras,
    dequantize,
)
from engine.worker.sampling.filters import pick, probabilities

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """A linear with an unpacked float weight."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if add_to is None else add_to.add_(y)


@dataclass(frozen=True, slots=True)
class TorchLowRank:
    """What a LoRA adapter adds to a linear, as torch products."""

    down: Tensor  # [ranks, in]
    ups: tuple[LowRankUp, ...]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.down, *(up.weight for up in self.ups)))

    def __call__(self, x: Tensor, y: Tensor) -> None:
        inner = F.linear(x, self.down)
        for ranks, columns, weight in self.ups:
            y[:, columns] += F.linear(inner[:, ranks], weight)


class TorchLoras:
    """The `LoraOperators` of any device, in plain torch."""

    def low_rank(self, down: Tensor, ups: Sequence[LowRankUp]) -> TorchLowRank:
        return TorchLowRank(down, tuple(ups))

    def slots(self, widths: Sequence[int]) -> SlottedLoras | None:
        return None


@dataclass(frozen=True, slots=True)
class TorchHeadLinear:
    """The linears of all heads with unpacked float weights."""

    weights: Tensor  # [heads, in, out]

    def __call__(self, x: Tensor, y: Tensor) -> None:
        torch.bmm(x.transpose(0, 1), self.weights, out=y.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root mean square norm."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return y if add_to is None else add_to.add_(y)

    def apply_(self, heads: Tensor) -> None:
        heads.copy_(self(heads))


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Mean and variance norm."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return y if add_to is None else add_to.add_(y)

    def apply_(self, heads: Tensor) -> None:
        heads.copy_(self(heads))


class TorchSampling:
    """The `SamplingOperators` of any device, in plain torch and NumPy."""

    def argmax(self, logits: Tensor) -> Argmax:
        return Argmax(*logits.max(dim=-1))

    def argmax_of(self, logits: Tensor, rows: Tensor) -> Argmax:
        return Argmax(*logits.index_select(0, rows).max(dim=-1))

    def forbid(self, logits: Tensor, rows: Tensor, allowed: Tensor) -> None:
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = ((allowed[:, :, None] >> places) & 1).view(len(rows), -1)[:, : logits.shape[1]]
        left = logits.index_select(0, rows).masked_fill(bits == 0, -torch.inf)
        logits.index_copy_(0, rows, left)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        tokens = []
        for row, sampling, point in draws:
            scores = logits[row].numpy(force=True)
            is_fine = np.isfinite(scores.max())
            tokens.append(pick(probabilities(scores, sampling), point) if is_fine else 0)
        return torch.tensor(tokens, device=logits.device)


@dataclass(frozen=True, slots=True)
class TorchHeads:
    """The `HeadOperators` of any device, in plain torch; weights in `dtype`, None: as they are."""

    dtype: torch.dtype | None = None

    def linear(self, weights: Sequence[LinearWeight]) -> HeadLinear:
        floats = [dequantize(weight).t().to(self.dtype) for weight in weights]
        return TorchHeadLinear(torch.stack(floats))

    def empty(self, kind: str, like: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return like.new_empty(sizes)

    def copy(self, x: Tensor, y: Tensor, pairs: int) -> None:
        split = 2 * pairs
        y[..., :pairs], y[..., pairs:split] = x[..., :split:2], x[..., 1:split:2]
        y[..., split:] = x[..., split:]


class TorchOperators:
    """The `Operators` of any device, in plain torch."""

    sampling: SamplingOperators = TorchSampling()
    heads: HeadOperators = TorchHeads()
    loras: LoraOperators = TorchLoras()

    def linear(self, weights: Sequence[LinearWeight], bias: Tensor | None) -> Linear:
        parts = [dequantize(weight) for weight in weights]
        return TorchLinear(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def experts(
        self, experts: Sequence[ExpertWeights], routing: Routing, activation: Activation
    ) -> Experts:
        return TorchExperts(self._linears_of(experts), routing, activation)

    def _linears_of(self, experts: Sequence[ExpertWeights]) -> list[tuple[Linear, Linear]]:
        """The linears up and down of each expert."""
        return [
            (self.linear((one.gate, one.up), one.up_bias), self.linear((one.down,), one.down_bias))
            for one in experts
        ]

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor

    def rms_norm(self, weight: Tensor, eps: float) -> Norm:
        return RmsNorm(weight, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> LayerNorm:
        return LayerNorm(weight, bias, eps)

    def activation(self, name: str, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
        act = ACTIVATIONS[name]
        if not is_gated:
            return act

        def gate(x: Tensor) -> Tensor:
            left, right = x.chunk(2, dim=-1)
            return act(left).mul_(right)

        return gate

    def clamped_swiglu(self, alpha: float, limit: float) -> Callable[[Tensor], Tensor]:
        def gate(x: Tensor) -> Tensor:
            left, right = x.chunk(2, dim=-1)
            left, right = left.clamp(max=limit), right.clamp(-limit, limit)
            return left * torch.sigmoid(alpha * left) * (right + 1)

        return gate

    def gate(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        act = ACTIVATIONS[name]
        return lambda x, by: act(x) * by

    def scale(self, factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x.mul_(factor)

    def gate_rows_(self, x: Tensor, scores: Tensor) -> None:
        x.mul_(scores.sigmoid())

    def without_gates(self, y: Tensor, heads: int) -> Tensor:
        return torch.cat((y[:, : 2 * heads : 2], y[:, 2 * heads :]), dim=1)

    def gate_heads_(self, x: Tensor, y: Tensor) -> None:
        heads = x.shape[1] // y.shape[2]
        x.mul_(y[:, 1 : 2 * heads : 2].reshape(x.shape).sigmoid())

    def apply_rope_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        first, second = heads.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        rotated = first * cos - second * sin
        second.mul_(cos).add_(first * sin)
        first.copy_(rotated)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)

    def recurrence(self, weights: RecurrentWeights) -> Recurrence:
        if isinstance(weights, ConvWeights):
            return TorchShortConv(weights)
        if isinstance(weights, MambaWeights):
            return TorchMambaScan(weights)
        return TorchDeltaNet(weights)
