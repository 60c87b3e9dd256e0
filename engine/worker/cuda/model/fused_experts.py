"""Mixtures of experts in one call of FlashInfer: sorted rows, both products and the weighted sum.

FlashInfer compiles about 180 files for these kernels, which takes more than an hour on few cores.
They are therefore used only if they are compiled already: in an installed `flashinfer-jit-cache`,
or in FlashInfer's cache from an earlier run.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.worker.cuda.model.linears import stacked
from engine.worker.model.experts import route
from engine.worker.ports import ExpertWeights, Routing, loaded, name_of

ALIGNMENT = 8  # sizes of products, in elements of 16 bits, must be multiples of it
ARCHITECTURES = {(8, 9): "89", (9, 0): "90", (10, 0): "100", (10, 3): "103", (12, 0): "120"}
# FlashInfer's `ActivationType` by Hugging Face's names.
ACTIVATIONS = {"silu": "Swiglu", "swish": "Swiglu"}


@dataclass(frozen=True, slots=True)
class FusedSetting:
    """What decides whether the kernels can be used."""

    capability: tuple[int, int]
    dtype: torch.dtype
    weights: str
    activation: str  # Hugging Face's name; "" if it has none
    sizes: Sequence[int]  # hidden, inner
    has_biases: bool = False

    def why_not(self, package: ModuleType | None) -> str:
        """Why FlashInfer's kernels cannot compute the experts; empty if they can."""
        odd = [size for size in self.sizes if size % ALIGNMENT]
        architecture = ARCHITECTURES.get(self.capability)
        if package is None:
            return "flashinfer is not installed"
        if self.dtype not in (torch.bfloat16, torch.float16):
            return f"fused experts need a 16-bit --dtype, not {name_of(self.dtype)}"
        if self.weights in ("int8", "fp8"):
            return f"fused experts need weights in 16 bits, not {self.weights}"
        if self.activation not in ACTIVATIONS:
            return f"fused experts have no activation {self.activation or 'of this family'!r}"
        if self.has_biases:
            return "fused experts with biases are not supported"
        if odd:
            return f"fused experts need sizes that are multiples of {ALIGNMENT}, not {odd[0]}"
        if architecture is None:
            major, minor = self.capability
            return f"fused experts do not support compute capability {major}.{minor}"
        if not is_compiled(package, architecture):
            return f"flashinfer's fused experts are not compiled for sm{architecture}"
        return ""


def is_compiled(package: ModuleType, architecture: str) -> bool:
    """Whether the kernels are in the installed package of kernels, or in FlashInfer's cache."""
    places = importlib.import_module(f"{package.__name__}.jit.env")
    name = f"fused_moe_{architecture}"
    folders = (places.FLASHINFER_AOT_DIR, places.FLASHINFER_JIT_DIR)
    return any((Path(folder) / name / f"{name}.so").exists() for folder in folders)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """`Experts` as one call. Its sum over the experts of a row does not depend on other rows."""

    up: Tensor  # up and gate, in this order, [experts, 2 * inner, hidden]
    down: Tensor  # [experts, hidden, inner]
    routing: Routing
    run: Callable[..., object]  # `cutlass_fused_moe`
    activation: Any  # FlashInfer's `ActivationType`

    @classmethod
    def of(
        cls,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        setting: FusedSetting,
        package: ModuleType,
    ) -> "FusedExperts":
        """Copies the weights of all experts into one tensor for each product."""
        module = importlib.import_module(f"{package.__name__}.fused_moe")
        kinds = importlib.import_module(f"{package.__name__}.tllm_enums").ActivationType
        dtype = setting.dtype
        return cls(
            up=torch.stack([stacked([loaded(e.up), loaded(e.gate)], dtype) for e in experts]),
            down=torch.stack([stacked([loaded(each.down)], dtype) for each in experts]),
            routing=routing,
            run=module.cutlass_fused_moe,
            activation=getattr(kinds, ACTIVATIONS[setting.activation]),
        )

    def __call__(self, x: Tensor, logits: Tensor, add_to: Tensor | None = None) -> Tensor:
        ids, weights = route(logits, self.routing)
        found = torch.empty_like(x)
        self.run(
            x,
            ids.to(torch.int32),
            weights.float(),
            self.up,
            self.down,
            x.dtype,
            quant_scales=None,
            output=found,
            activation_type=self.activation,
            use_fused_finalize=False,  # the fused one adds in an order that changes
        )
        return found if add_to is None else add_to.add_(found)
