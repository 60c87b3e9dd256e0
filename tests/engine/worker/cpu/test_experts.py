import pytest
import torch
from torch import Tensor

from engine.worker.cpu.linears import linears_of
from engine.worker.cpu.linears.experts import NativeExperts
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.experts import TorchExperts, route
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import ExpertGroups, ExpertWeights, Routing, Weight
from engine.worker.weights.formats import FORMATS
from tests.noise import noise

PLAIN = TorchOperators()
NUM_EXPERTS, HIDDEN, INNER = 6, 96, 70
ROUTING = Routing(top_k=2, renormalizes=True)


def operators_of(name: str) -> NativeOperators:
    return NativeOperators(NativeThreadPool(2), PackedStore(linears_of(name)))


def random_experts(
    name: str = "float32", down: str = "", has_bias: bool = True
) -> list[ExpertWeights]:
    """Weights in one format, those of `down` in another one if it is given."""

    def weight(format_name: str, outputs: int, inputs: int, seed: int) -> Weight:
        return FORMATS[format_name].convert(noise(outputs, inputs, seed=seed) * inputs**-0.5)

    return [
        ExpertWeights(
            weight(name, INNER, HIDDEN, 3 * each),
            weight(name, INNER, HIDDEN, 3 * each + 1),
            weight(down or name, HIDDEN, INNER, 3 * each + 2),
            noise(2 * INNER, seed=100 + each) if has_bias else None,
            noise(HIDDEN, seed=200 + each) if has_bias else None,
        )
        for each in range(NUM_EXPERTS)
    ]


def make(
    operators: NativeOperators, experts: list[ExpertWeights], routing: Routing = ROUTING
) -> NativeExperts:
    return operators.experts(experts, routing, operators.activation("silu", is_gated=True))


def dense(
    operators: NativeOperators, experts: list[ExpertWeights], x: Tensor, logits: Tensor
) -> Tensor:
    """The same sum from dense linears of these operators, over all rows."""
    activation = operators.activation("silu", is_gated=True)
    ids, weights = route(logits, ROUTING)
    outputs = torch.stack(
        [
            operators.linear([each.down], each.down_bias)(
                activation(operators.linear([each.gate, each.up], each.up_bias)(x))
            )
            for each in experts
        ]
    )
    of_rows = outputs[ids, torch.arange(len(x))[:, None]]
    return (of_rows * weights[:, :, None]).sum(dim=1)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 9, 130])
def test_experts_give_the_weighted_sum_of_dense_linears(name: str, rows: int) -> None:
    operators, weights = operators_of(name), random_experts(name)
    experts = make(operators, weights)
    x, logits = noise(rows, HIDDEN), 3 * noise(rows, NUM_EXPERTS, seed=1)
    expected = dense(operators, weights, x, logits)
    torch.testing.assert_close(experts(x, logits), expected, rtol=1e-5, atol=1e-5)
    start = noise(rows, HIDDEN, seed=2)
    added = experts(x, logits, start.clone())
    torch.testing.assert_close(added, start + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_a_row_has_the_same_bits_beside_any_rows(name: str) -> None:
    experts = make(operators_of(name), random_experts(name))
    x, logits = noise(150, HIDDEN), 3 * noise(150, NUM_EXPERTS, seed=1)
    together = experts(x, logits)
    for first, count in ((0, 1), (1, 2), (3, 3), (6, 31), (37, 100)):
        here = slice(first, first + count)
        assert torch.equal(experts(x[here], logits[here]), together[here])


def test_down_may_have_another_format_than_gate_and_up() -> None:
    operators = NativeOperators(NativeThreadPool(2), PackedStore(linears_of("int4", "int8")))
    weights = random_experts("int4", down="int8")
    x, logits = noise(7, HIDDEN), noise(7, NUM_EXPERTS, seed=1)
    expected = dense(operators, weights, x, logits)
    torch.testing.assert_close(make(operators, weights)(x, logits), expected)


BIAS = 0.5 * noise(NUM_EXPERTS, seed=7)
ROUTINGS = {
    "one": Routing(1, renormalizes=False),
    "some": Routing(4, renormalizes=True),
    "all": Routing(NUM_EXPERTS, renormalizes=False),
    "scaled": Routing(2, renormalizes=True, scales=1 + noise(NUM_EXPERTS, seed=8).abs()),
    "biased": Routing(3, renormalizes=True, bias=BIAS),
    "sigmoids": Routing(3, renormalizes=True, has_sigmoids=True),
    "biased_sigmoids": Routing(3, renormalizes=False, bias=BIAS, has_sigmoids=True),
    "groups_by_best": Routing(2, renormalizes=False, groups=ExpertGroups(3, 1, 1)),
    "groups_by_two": Routing(
        3, renormalizes=True, bias=BIAS, has_sigmoids=True, groups=ExpertGroups(3, 2, 2)
    ),
}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_the_router_is_that_of_torch(routing: Routing) -> None:
    weights = random_experts(has_bias=False)
    plain = PLAIN.experts(weights, routing, PLAIN.activation("silu", is_gated=True))
    assert isinstance(plain, TorchExperts)
    x, logits = noise(40, HIDDEN), 3 * noise(40, NUM_EXPERTS, seed=1)
    found = make(operators_of("float32"), weights, routing)(x, logits)
    torch.testing.assert_close(found, plain(x, logits), rtol=1e-4, atol=1e-4)


def test_of_equal_logits_the_lowest_experts_are_chosen() -> None:
    weights = random_experts()
    experts, x = make(operators_of("float32"), weights), noise(3, HIDDEN)
    equal = experts(x, torch.zeros(3, NUM_EXPERTS))
    only_first = torch.tensor([[0.0, 0.0, -90.0, -90.0, -90.0, -90.0]]).expand(3, -1).contiguous()
    assert torch.equal(equal, experts(x, only_first))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_nan_or_infinity_spoils_only_itself(value: float) -> None:
    experts = make(operators_of("float32"), random_experts())
    x, logits = noise(5, HIDDEN), noise(5, NUM_EXPERTS, seed=1)
    expected = experts(x, logits)
    x[2, 10], logits[2] = value, float("nan")
    found = experts(x, logits)
    assert not found[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])
