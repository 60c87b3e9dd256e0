"""Kernels around experts under Triton's interpreter against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.model.experts import route
from engine.worker.ports import ExpertGroups, Routing
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import noise

kernels = interpreted("experts")

# The interpreter computes with numpy, which warns of infinity and NaN; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def a_routing(num_experts: int, top_k: int, *, is_plain: bool, renormalizes: bool) -> Routing:
    if is_plain:
        return Routing(top_k, renormalizes)
    scales, bias = 1 + noise(num_experts, seed=7).abs(), noise(num_experts, seed=8)
    return Routing(top_k, renormalizes, scales, bias, has_sigmoids=True)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 40),
    num_experts=st.sampled_from([1, 7, 60, 128]),
    top_k=st.integers(1, 8),
    is_plain=st.booleans(),
    renormalizes=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sorted_at_once=st.sampled_from([16, 1024]),
)
def test_choices_are_those_of_torch_in_the_order_of_experts(
    rows: int,
    num_experts: int,
    top_k: int,
    is_plain: bool,
    renormalizes: bool,
    dtype: torch.dtype,
    sorted_at_once: int,
) -> None:
    top_k = min(top_k, num_experts)
    routing = a_routing(num_experts, top_k, is_plain=is_plain, renormalizes=renormalizes)
    # all different in bfloat16 too: torch chooses any of equal ones
    order = noise(rows, num_experts).argsort(dim=1).to(dtype)
    logits = torch.cat((order / 16, order[:, :3]), dim=1)[:, :num_experts]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "SORTED", sorted_at_once)
        found = kernels.choose(logits, routing)
    ids, weights = route(logits, routing)
    experts, order = ids.flatten().sort(stable=True)
    torch.testing.assert_close(found.weights, weights)
    assert torch.equal(found.experts, experts)
    assert torch.equal(found.sources, order // top_k)
    assert torch.equal(found.places.flatten()[order], torch.arange(rows * top_k, dtype=torch.int32))
    counts = torch.bincount(experts, minlength=num_experts)
    assert torch.equal(found.ends, counts.cumsum(0).to(torch.int32))


@pytest.mark.parametrize("width", [8, 1024, 1500])
@pytest.mark.parametrize("is_added", [False, True])
def test_the_sum_of_a_row_is_that_of_its_experts(width: int, is_added: bool) -> None:
    rows, top_k, dtype = 6, 4, torch.bfloat16
    choices = kernels.choose(noise(rows, 16), Routing(top_k, renormalizes=True))
    found = noise(rows * top_k, width, seed=1, dtype=dtype)
    wide = noise(rows, width + 8, seed=2, dtype=dtype)
    added = wide[:, :width] if is_added else None
    by_row = found.float()[choices.places.long()]
    wanted = (by_row * choices.weights[:, :, None]).sum(dim=1)
    wanted = wanted if added is None else wanted + added.float()
    result = kernels.add_up(found, choices, added)
    torch.testing.assert_close(result, wanted.to(dtype))
    assert (result is added) is is_added


def test_logits_that_are_no_numbers_change_no_other_row() -> None:
    logits, routing = noise(5, 20), Routing(3, renormalizes=True)
    wanted = kernels.choose(logits, routing)
    logits[2] = torch.nan
    found = kernels.choose(logits, routing)
    assert 0 <= int(found.experts.min()) <= int(found.experts.max()) < 20
    kept = [0, 1, 3, 4]
    assert torch.equal(found.weights[kept], wanted.weights[kept])
    for each in (found, wanted):
        chosen = each.experts[each.places.long()]
        assert torch.equal(chosen[kept], route(logits, routing)[0][kept])


def test_groups_and_many_rows_are_left_to_torch() -> None:
    plain = Routing(8, renormalizes=True)
    assert kernels.takes(plain, 1024)
    assert not kernels.takes(plain, 1025)
    assert not kernels.takes(Routing(8, True, groups=ExpertGroups(8, 4, 2)), 1)
