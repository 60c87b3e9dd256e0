"""Layer operators on a GPU: products by torch or our kernels, and our norms and gates."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import ModuleType

import torch
from torch import Tensor

from engine.worker.cuda.model.experts import (
    FloatProduct,
    FourBitProduct,
    GroupedExperts,
    MaskedExperts,
    ProductOfExperts,
    why_not_grouped,
)
from engine.worker.cuda.model.four_bit import HALVES, are_in_4_bits, four_bit_linear, packed
from engine.worker.cuda.model.fp8_weights import Fp8WeightLinear, stacked_fp8
from engine.worker.cuda.model.linears import (
    FP8_ALIGNMENT,
    PLAIN,
    EightBitLinear,
    FastProducts,
    JoinedLinear,
    MakesLinear,
    float_linear,
    fp8_linear,
    int8_linear,
    stacked,
)
from engine.worker.model.torch_operators import (
    TorchHeads,
    TorchLoras,
    TorchOperators,
    TorchSampling,
)
from engine.worker.ports import (
    Activation,
    Experts,
    ExpertWeights,
    Linear,
    LinearWeight,
    LoraOperators,
    Norm,
    Recurrence,
    RecurrentWeights,
    Routing,
    SamplingOperators,
    Weight,
    common_format,
    loaded,
)

logger = logging.getLogger(__name__)

STORED = "stored"
LINEARS: dict[str, MakesLinear] = {
    "int8": int8_linear,
    "int4": four_bit_linear,
    "fp8": fp8_linear,
}


@dataclass(frozen=True, slots=True)
class FusedRmsNorm:
    """RMS norm in one kernel."""

    weight: Tensor
    eps: float
    kernels: ModuleType  # `kernels.rows`

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
    kernels: ModuleType  # `kernels.rows`

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty((len(x), x.shape[1] // 2), dtype=x.dtype, device=x.device)
        self.kernels.gated(self.name, x, y)
        return y


class CudaOperators(TorchOperators):
    """Operators on a GPU. `weights` is a format in `LINEARS`, a dtype, or `STORED`: each linear in
    the checkpoint's own format, in 4 bits if all its codes have 4, and in `others` where there is
    no such linear.

    Plain torch is used without the kernels in `fast`, and for LayerNorm, and activations or widths
    for which there is no kernel.
    """

    def __init__(
        self,
        place: torch.device,
        dtype: torch.dtype,
        weights: str,
        fast: FastProducts = PLAIN,
        sampling: SamplingOperators | None = None,
        others: str = "",
        *,
        multiplies_fp8: bool = False,
        loras: LoraOperators | None = None,
    ) -> None:
        self._place = place
        self._dtype = dtype
        self._weights = weights
        self._others = others
        self._fast = fast
        self._multiplies_fp8 = multiplies_fp8
        self.heads = TorchHeads(dtype)
        self.loras = loras or TorchLoras()
        self.sampling = sampling or TorchSampling()
        self._logged: set[str] = set()  # reasons

    def linear(self, weights: Sequence[LinearWeight], bias: Tensor | None) -> Linear:
        parts = [loaded(weight) for weight in weights]
        runs = [list(run) for _, run in groupby(parts, lambda part: self._format_of([part]))]
        if len(runs) == 1:
            if self._weights == STORED and (found := self._stored_fp8(parts, bias)):
                return found
            make = LINEARS.get(self._format_of(parts), float_linear)
            return make(parts, bias, self._dtype, self._fast)
        sizes = [sum(part.shape[0] for part in run) for run in runs]
        biases = [None] * len(runs) if bias is None else torch.split(bias, sizes)
        linears = [self.linear(run, own) for run, own in zip(runs, biases, strict=True)]
        return JoinedLinear(linears, sizes)

    def _format_of(self, weights: Sequence[Weight]) -> str:
        """The format in which a linear of these weights is computed."""
        if self._weights != STORED:
            return self._weights
        if are_in_4_bits(weights):
            return "int4"
        if isinstance(weights[0], Tensor):
            return ""
        stored = common_format(weights) or ""
        return stored if stored in LINEARS else self._others

    def _stored_fp8(self, parts: Sequence[Weight], bias: Tensor | None) -> Linear | None:
        """The linear of fp8 weights of a checkpoint, with fp8 activations if there is one scale
        per output channel and the GPU multiplies so; None of other weights."""
        weight = stacked_fp8(parts)
        if weight is None:
            return None
        outputs, width = weight.shape
        is_aligned = not (outputs % FP8_ALIGNMENT or width % FP8_ALIGNMENT)
        if self._multiplies_fp8 and is_aligned and weight.scales.shape[1] == 1:
            return EightBitLinear(weight.values, weight.scales, bias, self._fast)
        return Fp8WeightLinear(weight, bias, self._fast)

    def experts(
        self, experts: Sequence[ExpertWeights], routing: Routing, activation: Activation
    ) -> Experts:
        """Products over rows sorted by expert where they fit; elsewhere each expert computes all
        rows."""
        ups = [weight for each in experts for weight in (loaded(each.gate), loaded(each.up))]
        downs = [loaded(each.down) for each in experts]
        up = self._product(ups, [each.up_bias for each in experts])
        down = self._product(downs, [each.down_bias for each in experts])
        if not isinstance(up, str) and not isinstance(down, str):
            return GroupedExperts(up, down, routing, activation, self._fast.experts)
        reason = up if isinstance(up, str) else str(down)
        if reason not in self._logged:
            logger.warning("each token is computed by all experts, which is slow: %s", reason)
            self._logged.add(reason)
        return MaskedExperts(self._linears_of(experts), routing, activation)

    def _product(
        self, weights: Sequence[Weight], biases: Sequence[Tensor | None]
    ) -> ProductOfExperts | str:
        """The product with equally many weights of each expert, or why there is none."""
        given = [bias for bias in biases if bias is not None]
        bias = torch.stack(given) if given else None
        if self._format_of(weights) == "int4":
            kernels = self._fast.four_bit
            if kernels is None or self._dtype not in HALVES:
                return "the Triton kernel for 4-bit weights is not used"
            return FourBitProduct(packed(weights), bias, kernels)
        if reason := self._why_not_grouped(weights[0].shape):
            return reason
        whole = stacked(weights, self._dtype)
        return FloatProduct(whole.view(len(biases), -1, whole.shape[1]), bias)

    def _why_not_grouped(self, sizes: Sequence[int]) -> str:
        if self._fast.is_batch_invariant:
            return "--batch-invariant"
        is_gpu = self._place.type == "cuda"
        capability = torch.cuda.get_device_capability(self._place) if is_gpu else (0, 0)
        return why_not_grouped(capability, self._dtype, self._weights, sizes)

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._place)

    def rms_norm(self, weight: Tensor, eps: float) -> Norm:
        rows = self._fast.rows
        if rows is None or len(weight) > rows.MAX_PAIR_WIDTH:
            return super().rms_norm(weight, eps)
        return FusedRmsNorm(weight, eps, rows)

    def activation(self, name: str, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
        rows = self._fast.rows
        if rows is None or not is_gated or name not in rows.GATES:
            return super().activation(name, is_gated=is_gated)
        return FusedGate(name, rows)

    def recurrence(self, weights: RecurrentWeights) -> Recurrence:
        kernels = self._fast.recurrence
        if kernels is None or not kernels.has_kernels(weights.shape):
            return super().recurrence(weights)
        return partial(kernels.recurrence, weights)
