"""Operators of a GPU with kernels that stand in for ours and hold to their conditions."""

from dataclasses import dataclass, field
from types import ModuleType
from typing import cast

import pytest
import torch
from torch import Tensor

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import FP8
from engine.worker.cuda.model.linears import EightBitLinear, FastProducts, FloatLinear
from engine.worker.cuda.model.operators import STORED, CudaOperators, FusedGate, FusedRmsNorm
from engine.worker.model.torch_operators import ACTIVATIONS, RmsNorm, TorchOperators
from engine.worker.ports import LinearWeight
from engine.worker.weights.formats.int8 import quantize
from tests.noise import bfloat16_noise as noise

CPU = torch.device("cpu")
PLAIN = TorchOperators()


@dataclass
class StandingRows:
    """The module `kernels.rows`: what it asks for is asserted; computed is with torch."""

    calls: list[str] = field(default_factory=list)
    MAX_PAIR_WIDTH: int = 64
    GATES: tuple[str, ...] = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        assert x.ndim in (2, 3)
        assert x.stride(-1) == out.stride(-1) == 1
        assert x.shape == out.shape
        self.calls.append("norm")
        reference.rms_norm(x, weight, eps, out)

    def gated(self, name: str, x: Tensor, out: Tensor) -> None:
        assert x.stride(1) == 1
        assert out.is_contiguous()
        assert out.shape == (len(x), x.shape[1] // 2)
        self.calls.append(name)
        reference.gated(name, x, out)


def make(rows: StandingRows) -> CudaOperators:
    fast = FastProducts(cast(ModuleType, rows))
    return CudaOperators(CPU, torch.bfloat16, "auto", fast)


def test_norms_are_torchs_also_in_place_on_heads_that_lie_apart() -> None:
    rows = StandingRows()
    x, weight = noise(5, 48), noise(48, seed=1)
    fused, plain = (each.rms_norm(weight, 1e-5) for each in (make(rows), PLAIN))
    assert isinstance(fused, FusedRmsNorm)
    torch.testing.assert_close(fused(x), plain(x))
    qkv, weight = noise(5, 6, 16, seed=2), noise(16, seed=3)
    wanted = qkv.clone()
    make(rows).rms_norm(weight, 1e-5).apply_(qkv[:, :4])
    PLAIN.rms_norm(weight, 1e-5).apply_(wanted[:, :4])
    torch.testing.assert_close(qkv, wanted)
    assert rows.calls == ["norm", "norm"]


def test_norms_of_more_than_a_program_keeps_are_left_to_torch() -> None:
    assert isinstance(make(StandingRows()).rms_norm(noise(65), 1e-5), RmsNorm)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_torchs(name: str) -> None:
    rows = StandingRows()
    operators, x = make(rows), noise(4, 32)
    gated = operators.activation(name, is_gated=True)
    wanted = PLAIN.activation(name, is_gated=True)(x.float())  # rounded once
    torch.testing.assert_close(gated(x).float(), wanted, rtol=1e-2, atol=1e-2)
    assert isinstance(gated, FusedGate) == (name in rows.GATES)
    assert rows.calls == [name] * (name in rows.GATES)
    alone = operators.activation(name, is_gated=False)
    torch.testing.assert_close(alone(x), PLAIN.activation(name, is_gated=False)(x))


def test_without_kernels_all_is_plain_torch() -> None:
    operators = CudaOperators(CPU, torch.bfloat16, "auto")
    assert isinstance(operators.rms_norm(noise(16), 1e-5), RmsNorm)
    assert not isinstance(operators.activation("silu", is_gated=True), FusedGate)


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
        operators = CudaOperators(CPU, torch.bfloat16, name)
        stored: tuple[LinearWeight, LinearWeight] = (weight, eight)
        for one, dtype in zip(stored, wanted, strict=True):
            linear = operators.linear([one], None)
            assert isinstance(linear, FloatLinear | EightBitLinear)
            assert (linear.weight if isinstance(linear, FloatLinear) else linear).dtype == dtype
        assert operators.linear([weight, eight], None)(noise(2, 32)).shape == (2, 32)
