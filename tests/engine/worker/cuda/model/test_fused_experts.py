import sys
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.cuda.model.fused_experts import FusedExperts, FusedSetting
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import ExpertWeights, Routing
from tests.noise import bfloat16_noise as noise

HIDDEN, INNER, NUM_EXPERTS = 32, 24, 5
PLAIN = TorchOperators()
SILU = PLAIN.activation("silu", is_gated=True)
SETTING = FusedSetting((9, 0), torch.bfloat16, "bfloat16", "silu", (HIDDEN, INNER))


class ActivationType(IntEnum):
    Swiglu = 3


def cutlass_fused_moe(
    x: Tensor,
    ids: Tensor,
    scales: Tensor,
    up: Tensor,
    down: Tensor,
    dtype: torch.dtype,
    **more: Any,
) -> list[Tensor]:
    """What FlashInfer documents: the first half of `up` is the linear one, the second the gate."""
    assert (ids.dtype, scales.dtype, dtype) == (torch.int32, torch.float32, torch.bfloat16)
    assert more["activation_type"] is ActivationType.Swiglu
    assert more["use_fused_finalize"] is False
    total = torch.zeros(x.shape, dtype=torch.float32)
    for row in range(len(x)):
        for expert, scale in zip(ids[row], scales[row], strict=True):
            linear, gate = F.linear(x[row], up[expert]).chunk(2)
            total[row] += scale * F.linear(F.silu(gate) * linear, down[expert]).float()
    more["output"].copy_(total)
    return [more["output"]]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with the parts of FlashInfer that are used; nothing is compiled."""
    parts: dict[str, dict[str, object]] = {
        "": {},
        ".jit": {},
        ".jit.env": {"FLASHINFER_AOT_DIR": tmp_path / "aot", "FLASHINFER_JIT_DIR": tmp_path},
        ".fused_moe": {"cutlass_fused_moe": cutlass_fused_moe},
        ".tllm_enums": {"ActivationType": ActivationType},
    }
    for name, content in parts.items():
        module = ModuleType(f"fake_flashinfer{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return sys.modules["fake_flashinfer"]


def test_fused_experts_give_the_sum_of_plain_torch(package: ModuleType) -> None:
    experts = [
        ExpertWeights(
            noise(INNER, HIDDEN, seed=3 * each) / 6,
            noise(INNER, HIDDEN, seed=3 * each + 1) / 6,
            noise(HIDDEN, INNER, seed=3 * each + 2) / 6,
        )
        for each in range(NUM_EXPERTS)
    ]
    routing = Routing(2, renormalizes=True)
    fused = FusedExperts.of(experts, routing, SETTING, package)
    x, logits = noise(7, HIDDEN, seed=90), noise(7, NUM_EXPERTS, seed=91)
    expected = PLAIN.experts(experts, routing, SILU)(x, logits)
    torch.testing.assert_close(fused(x, logits), expected, rtol=2e-2, atol=2e-2)
    start = noise(7, HIDDEN, seed=92)
    added = fused(x, logits, start.clone())
    torch.testing.assert_close(added, start + expected, rtol=2e-2, atol=3e-2)


def test_kernels_that_are_not_compiled_are_not_used(package: ModuleType, tmp_path: Path) -> None:
    assert SETTING.why_not(package) == "flashinfer's fused experts are not compiled for sm90"
    for folder, capability in (("aot", (9, 0)), ("", (10, 0))):
        name = f"fused_moe_{capability[0] * 10 + capability[1]}"
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / name / f"{name}.so").touch()
        assert replace(SETTING, capability=capability).why_not(package) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "need a 16-bit --dtype, not float32"),
        ({"weights": "int8"}, "need weights in 16 bits, not int8"),
        ({"activation": ""}, "have no activation 'of this family'"),
        ({"has_biases": True}, "with biases are not supported"),
        ({"sizes": (36, 24)}, "multiples of 8, not 36"),
        ({"capability": (7, 5)}, "do not support compute capability 7.5"),
    ],
)
def test_the_reason_against_fused_experts_is_named(
    package: ModuleType, changes: dict[str, Any], reason: str
) -> None:
    assert reason in replace(SETTING, **changes).why_not(package)
    assert SETTING.why_not(None) == "flashinfer is not installed"
