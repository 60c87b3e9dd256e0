from dataclasses import replace

import pytest
import torch

from engine.worker.cuda.model.experts import GroupedExperts, MaskedExperts, why_not_grouped
from engine.worker.cuda.model.operators import CudaOperators
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import ExpertWeights, Routing
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import bfloat16_noise as noise

CPU = torch.device("cpu")
PLAIN = TorchOperators()
SILU = PLAIN.activation("silu", is_gated=True)
NUM_EXPERTS, HIDDEN, INNER = 5, 32, 24
SIZES = (HIDDEN, INNER)


def random_experts(has_bias: bool) -> list[ExpertWeights]:
    return [
        ExpertWeights(
            noise(INNER, HIDDEN, seed=3 * each) / 6,
            noise(INNER, HIDDEN, seed=3 * each + 1) / 6,
            noise(HIDDEN, INNER, seed=3 * each + 2) / 6,
            noise(2 * INNER, seed=100 + each) if has_bias else None,
            noise(HIDDEN, seed=200 + each) if has_bias else None,
        )
        for each in range(NUM_EXPERTS)
    ]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_each_way_gives_the_sum_of_plain_torch(rows: int, has_bias: bool) -> None:
    experts, routing = random_experts(has_bias), Routing(2, renormalizes=True)
    masked = CudaOperators(CPU, torch.bfloat16, "auto")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masked, "_why_not_grouped", lambda sizes: "")
        grouped = masked.experts(experts, routing, SILU)
    assert isinstance(grouped, GroupedExperts)
    x = noise(rows, HIDDEN, seed=7)
    logits = noise(rows, NUM_EXPERTS, seed=8).argsort(dim=1).bfloat16() / 2  # none are equal
    expected = PLAIN.experts(experts, routing, SILU)(x, logits)
    in_few_launches = replace(grouped, kernels=interpreted("experts"))
    others = grouped, in_few_launches, masked.experts(experts, routing, SILU)
    assert isinstance(others[2], MaskedExperts)
    for other in others:
        torch.testing.assert_close(other(x, logits), expected, rtol=2e-2, atol=2e-2)
        start = noise(rows, HIDDEN, seed=9)
        added = other(x, logits, start.clone())
        torch.testing.assert_close(added, start + expected, rtol=2e-2, atol=3e-2)


def test_an_expert_that_a_row_did_not_choose_cannot_spoil_it() -> None:
    experts = random_experts(has_bias=False)
    experts[4].down.fill_(float("inf"))  # type: ignore[union-attr]
    masked = CudaOperators(CPU, torch.bfloat16, "auto")
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -9.0]])
    found = masked.experts(experts, Routing(2, renormalizes=True), SILU)(noise(1, HIDDEN), logits)
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("capability", "dtype", "weights", "sizes", "reason"),
    [
        ((9, 0), torch.bfloat16, "bfloat16", SIZES, ""),
        ((9, 0), torch.float16, "float16", SIZES, "need --dtype bfloat16, not float16"),
        ((9, 0), torch.bfloat16, "int8", SIZES, "need weights in bfloat16, not int8"),
        ((8, 6), torch.bfloat16, "bfloat16", SIZES, "capability 9.0, this one has 8.6"),
        ((9, 0), torch.bfloat16, "bfloat16", (36, 24), "multiples of 8, not 36"),
    ],
)
def test_the_reason_against_grouped_products_is_named(
    capability: tuple[int, int],
    dtype: torch.dtype,
    weights: str,
    sizes: tuple[int, ...],
    reason: str,
) -> None:
    found = why_not_grouped(capability, dtype, weights, sizes)
    assert reason in found
    assert bool(found) == bool(reason)
