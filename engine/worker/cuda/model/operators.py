"""Layer operators on a GPU: torch GEMMs, and FlashInfer kernels for norms and activations."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.worker.cuda.model.experts import GroupedExperts, MaskedExperts, why_not_grouped
from engine.worker.cuda.model.kernels import Kernels, fits
from engine.worker.cuda.model.linears import (
    PLAIN,
    FastProducts,
    MakesLinear,
    float_linear,
    fp8_linear,
    int8_linear,
)
from engine.worker.model.torch_operators import TorchLowRank, TorchOperators, TorchSampling
from engine.worker.ports import (
    Activation,
    Experts,
    ExpertWeights,
    Linear,
    LinearWeight,
    LowRankUp,
    Norm,
    Routing,
    SamplingOperators,
    common_format,
    loaded,
)

logger = logging.getLogger(__name__)

STORED = "stored"
LINEARS: dict[str, MakesLinear] = {"int8": int8_linear, "fp8": fp8_linear}
TRIAL_WIDTH = 64  # output width of a gate's first run, which compiles it


@dataclass(frozen=True, slots=True)
class FusedRmsNorm:
    """RMS norm in one kernel."""

    weight: Tensor
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.kernels.rms_norm(x, self.weight, self.eps, y)
        return y if add_to is None else add_to.add_(y)

    def apply_(self, heads: Tensor) -> None:
        self.kernels.rms_norm(heads, self.weight, self.eps, heads)


@dataclass(frozen=True, slots=True)
class FusedGate:
    """A gated activation in one kernel; `name` is Hugging Face's."""

    name: str
    gate: Callable[[Tensor, Tensor], None]
    fallback: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        width = x.shape[1] // 2
        if not fits(width, x.dtype):
            return self.fallback(x)
        y = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
        self.gate(x, y)
        return y


class CudaOperators(TorchOperators):
    """Operators on a GPU. `weights` is a format in `LINEARS`, a dtype, or `STORED`: each
    linear in the checkpoint's own format.

    Plain torch is used without `kernels`, and for LayerNorm, float32, and activations or widths for
    which there is no kernel.
    """

    def __init__(
        self,
        place: torch.device,
        dtype: torch.dtype,
        weights: str,
        kernels: Kernels | None,
        fast: FastProducts = PLAIN,
        sampling: SamplingOperators | None = None,
    ) -> None:
        self._place = place
        self._dtype = dtype
        self._weights = weights
        self._kernels = kernels
        self._fast = fast
        self.sampling = sampling or TorchSampling()
        self._logged: set[str] = set()  # reasons
        self.first_runs: dict[str, Callable[[], object]] = {}  # compile the model's kernels

    def linear(self, weights: Sequence[LinearWeight], bias: Tensor | None) -> Linear:
        parts = [loaded(weight) for weight in weights]
        name = common_format(parts) if self._weights == STORED else self._weights
        make = LINEARS.get(name or "", float_linear)
        return make(parts, bias, self._dtype, self._fast)

    def experts(
        self, experts: Sequence[ExpertWeights], routing: Routing, activation: Activation
    ) -> Experts:
        """Grouped products where they fit; elsewhere each expert computes all rows."""
        reason = self._why_not_grouped(loaded(experts[0].down).shape)
        if not reason:
            return GroupedExperts.of(experts, routing, activation, self._dtype)
        if reason not in self._logged:
            logger.warning("each token is computed by all experts, which is slow: %s", reason)
            self._logged.add(reason)
        return MaskedExperts(self._linears_of(experts), routing, activation)

    def _why_not_grouped(self, sizes: Sequence[int]) -> str:
        if self._fast.is_batch_invariant:
            return "--batch-invariant"
        is_gpu = self._place.type == "cuda"
        capability = torch.cuda.get_device_capability(self._place) if is_gpu else (0, 0)
        return why_not_grouped(capability, self._dtype, self._weights, sizes)

    def low_rank(self, down: Tensor, ups: Sequence[LowRankUp]) -> TorchLowRank:
        """A low-rank product in the dtype of the activations."""
        place, dtype = self._place, self._dtype
        moved = [up._replace(weight=up.weight.to(place, dtype)) for up in ups]
        return super().low_rank(down.to(place, dtype), moved)

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._place)

    def rms_norm(self, weight: Tensor, eps: float) -> Norm:
        if not self._has_norm(len(weight)):
            return super().rms_norm(weight, eps)
        assert self._kernels is not None, "a norm kernel exists"
        norm = FusedRmsNorm(weight, eps, self._kernels)
        self.first_runs.setdefault("norms", lambda: norm(self._zeros(len(weight))))
        return norm

    def activation(self, name: str, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
        plain = super().activation(name, is_gated=is_gated)
        gate = self._kernels.gated(name) if self._kernels is not None and is_gated else None
        if gate is None:
            return plain
        fused = FusedGate(name, gate, plain)
        self.first_runs.setdefault(name, lambda: fused(self._zeros(2 * TRIAL_WIDTH)))
        return fused

    def _has_norm(self, width: int) -> bool:
        kernels = self._kernels
        return kernels is not None and kernels.has_norm and fits(width, self._dtype)

    def _zeros(self, width: int) -> Tensor:
        return torch.zeros(1, width, dtype=self._dtype, device=self._place)
