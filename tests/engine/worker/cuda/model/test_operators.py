"""Operators of a GPU with kernels that stand in for FlashInfer's and hold to its conditions."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.cuda.kernels.reference import FP8
from engine.worker.cuda.model.kernels import GATED
from engine.worker.cuda.model.linears import EightBitLinear, FloatLinear
from engine.worker.cuda.model.operators import STORED, CudaOperators, FusedGate, FusedRmsNorm
from engine.worker.model.torch_operators import ACTIVATIONS, RmsNorm, TorchOperators
from engine.worker.ports import LinearWeight
from engine.worker.weights.formats.int8 import quantize
from tests.noise import bfloat16_noise as noise

CPU = torch.device("cpu")
PLAIN = TorchOperators()


@dataclass
class StandingKernels:
    """What FlashInfer asks for is asserted; computed is with torch."""

    calls: list[str] = field(default_factory=list)
    has_norm: bool = True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert weight.dtype == x.dtype == out.dtype
        assert x.dim() in (2, 3)
        assert x.stride(-1) == out.stride(-1) == 1
        assert x.shape == out.shape
        self.calls.append("norm")
        out.copy_(F.rms_norm(x, weight.shape, weight, eps))

    def gated(self, name: str) -> Callable[[Tensor, Tensor], None] | None:
        if name not in GATED:
            return None

        def gate(x: Tensor, out: Tensor) -> None:
            assert x.dtype in (torch.bfloat16, torch.float16)
            assert x.is_contiguous()
            assert out.is_contiguous()
            assert out.shape == (len(x), x.shape[1] // 2)
            assert out.shape[1] * x.itemsize % 16 == 0
            self.calls.append(name)
            out.copy_(PLAIN.activation(name, is_gated=True)(x))

        return gate


def make(kernels: StandingKernels | None, dtype: torch.dtype = torch.bfloat16) -> CudaOperators:
    return CudaOperators(CPU, dtype, "auto", kernels)


def test_norms_are_torchs_also_in_place_on_heads_that_lie_apart() -> None:
    kernels = StandingKernels()
    x, weight = noise(5, 48), noise(48, seed=1)
    fused, plain = (each.rms_norm(weight, 1e-5) for each in (make(kernels), PLAIN))
    assert isinstance(fused, FusedRmsNorm)
    torch.testing.assert_close(fused(x), plain(x))
    qkv, weight = noise(5, 6, 16, seed=2), noise(16, seed=3)
    wanted = qkv.clone()
    make(kernels).rms_norm(weight, 1e-5).apply_(qkv[:, :4])
    PLAIN.rms_norm(weight, 1e-5).apply_(wanted[:, :4])
    torch.testing.assert_close(qkv, wanted)
    assert kernels.calls == ["norm", "norm"]


def test_widths_that_are_no_whole_vectors_are_left_to_torch() -> None:
    kernels = StandingKernels()
    assert isinstance(make(kernels).rms_norm(noise(12), 1e-5), RmsNorm)
    gate = make(kernels).activation("silu", is_gated=True)
    x = noise(3, 2 * 12)
    torch.testing.assert_close(gate(x), PLAIN.activation("silu", is_gated=True)(x))
    assert kernels.calls == []


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_torchs(name: str) -> None:
    kernels = StandingKernels()
    operators, x = make(kernels), noise(4, 32)
    gated = operators.activation(name, is_gated=True)
    torch.testing.assert_close(gated(x), PLAIN.activation(name, is_gated=True)(x))
    assert isinstance(gated, FusedGate) == (name in GATED)
    assert kernels.calls == [name] * (name in GATED)
    alone = operators.activation(name, is_gated=False)
    torch.testing.assert_close(alone(x), PLAIN.activation(name, is_gated=False)(x))


def test_what_the_model_asks_for_is_known_and_can_be_run_once() -> None:
    kernels = StandingKernels()
    operators = make(kernels)
    for _ in range(3):
        operators.rms_norm(noise(16), 1e-5)
        operators.activation("silu", is_gated=True)
    operators.activation("relu", is_gated=True)
    assert list(operators.first_runs) == ["norms", "silu"]
    for run in operators.first_runs.values():
        run()
    assert kernels.calls == ["norm", "silu"]


def test_without_kernels_all_is_plain_torch() -> None:
    operators = make(None)
    assert isinstance(operators.rms_norm(noise(16), 1e-5), RmsNorm)
    assert not isinstance(operators.activation("silu", is_gated=True), FusedGate)
    assert operators.first_runs == {}


def test_without_a_compiled_norm_torchs_is_used_and_gates_stay_fused() -> None:
    operators = make(StandingKernels(has_norm=False))
    assert isinstance(operators.rms_norm(noise(16), 1e-5), RmsNorm)
    assert isinstance(operators.activation("silu", is_gated=True), FusedGate)


def test_linears_are_computed_as_stored_or_as_asked() -> None:
    weight = torch.randn(16, 32).bfloat16()
    eight = quantize(weight.float())
    kinds = {
        "bfloat16": [torch.bfloat16, torch.bfloat16],
        "int8": [torch.int8, torch.int8],
        "fp8": [FP8, FP8],
        STORED: [torch.bfloat16, torch.int8],
    }
    for name, wanted in kinds.items():
        operators = CudaOperators(CPU, torch.bfloat16, name, None)
        stored: tuple[LinearWeight, LinearWeight] = (weight, eight)
        for one, dtype in zip(stored, wanted, strict=True):
            linear = operators.linear([one], None)
            assert isinstance(linear, FloatLinear | EightBitLinear)
            assert (linear.weight if isinstance(linear, FloatLinear) else linear).dtype == dtype
        assert operators.linear([weight, eight], None)(noise(2, 32)).shape == (2, 32)
