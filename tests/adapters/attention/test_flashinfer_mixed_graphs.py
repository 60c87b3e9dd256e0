from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from engine.worker.cuda.step.graphs import mixed_sizes
from engine.worker.model.layout import blank_layout, padded
from engine.worker.ports import RaggedLayout, StepLimits
from tests.adapters.attention.flashinfer_cases import Made, Paged, make, paged, requests

SIZE = 64
LIMITS = StepLimits(max_requests=8, max_tokens=128, max_model_len=128)
PIECES = Paged(((7, 1), (30, 1), (0, 9), (12, 5)), 4)


def noise(rows: int, seed: int = 1) -> Tensor:
    return torch.randn((rows, 8, 8), generator=torch.Generator().manual_seed(seed))


def run(made: Made, fused: Tensor) -> Tensor:
    made.stand_in.catch_up()
    q, k, v = torch.split(fused.to(made.spec.dtype).clone(), [4, 2, 2], dim=1)
    return made.attention.run(0, q, k, v, None)


def captured(made: Made, spare: int, size: int = SIZE) -> tuple[int, ...]:
    """Plan and run what a graph is captured with."""
    blank = replace(blank_layout(size, spare, made.cache.block_size), num_decodes=0)
    baked = made.attention.plan_captured(blank)
    run(made, noise(size))
    return baked


def both(made: Made, layout: RaggedLayout, spare: int, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """The attention of a step in a graph, and by an eager launch."""
    fused = noise(size, seed=4)
    made.attention.plan_captured(padded(layout, size, spare))
    in_graph = run(made, fused)[: layout.num_tokens]
    made.attention.plan(layout)
    return in_graph, run(made, fused[: layout.num_tokens])


@settings(deadline=None, max_examples=40)
@given(step=paged(requests))
def test_a_step_in_a_graph_has_the_attention_of_an_eager_one(step: Paged) -> None:
    made, layout = make(step.num_pages, step.page_size), step.layout()
    assume(not layout.is_decode_only)
    captured(made, step.num_pages)
    in_graph, eager = both(made, layout, step.num_pages)
    torch.testing.assert_close(in_graph, eager, rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 5])
def test_what_a_graph_contains_does_not_change_with_the_step(window: int | None) -> None:
    made = make(60, 4, window=window)
    before = captured(made, 60)
    tables = made.last_plan("mixed")["paged_kv_indices"].data_ptr()
    for turn in range(1, 6):
        step = Paged(((turn, 1),) * turn + ((0, 8), (turn, 4)), 4, seed=turn)
        assert made.attention.plan_captured(padded(step.layout(), SIZE, 60)) == before
        assert made.last_plan("mixed")["paged_kv_indices"].data_ptr() == tables
        in_graph, eager = both(made, step.layout(), 60)
        torch.testing.assert_close(in_graph, eager, rtol=0, atol=0)


def test_a_graph_has_a_request_for_each_row_and_empty_ones_behind_them() -> None:
    made = make(60, 4)
    captured(made, 60)
    made.attention.plan_captured(padded(PIECES.layout(), SIZE, 60))
    plan = made.last_plan("mixed")
    rows = plan["qo_indptr"].diff().tolist()
    padding = SIZE - 16
    assert rows == [1, 1, 9, 5] + [1] * padding + [0] * (SIZE - 4 - padding)
    pages = plan["paged_kv_indptr"].diff().tolist()
    assert pages == [2, 8, 3, 5] + [1] * padding + [0] * (SIZE - 4 - padding)
    assert plan["max_token_per_sequence"] == 9


def test_padding_writes_to_the_spare_page_alone() -> None:
    made = make(40, 4)
    captured(made, 40)
    layout = Paged(((5, 1), (4, 4)), 4).layout()
    before = made.cache.keys[0].clone()
    made.attention.plan_captured(padded(layout, SIZE, 40))
    run(made, noise(SIZE, 3))
    changed = (made.cache.keys[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == sorted({*(layout.slots // 4).tolist(), 40})


def test_graphs_of_both_kinds_and_eager_steps_take_turns() -> None:
    made = make(60, 4)
    captured(made, 60)
    captured(made, 60, 128)
    decodes = Paged(((7, 1), (30, 1)), 4).layout()
    for turn, size in enumerate((64, 8, 128, 64, 8, 128)):
        layout = decodes if size == 8 else PIECES.layout()
        in_graph, eager = both(made, layout, 60, size)
        torch.testing.assert_close(in_graph, eager, rtol=0, atol=0, msg=f"turn {turn}")


def test_the_workspace_is_large_enough_for_the_largest_graph_of_few_requests() -> None:
    limits = StepLimits(max_requests=2, max_tokens=2048, max_model_len=16)
    made = make(8, 4, limits=limits)
    size = mixed_sizes(limits.max_tokens)[-1]
    captured(made, 8, size)
    in_graph, eager = both(made, Paged(((3, 1), (0, 9)), 4).layout(), 8, size)
    torch.testing.assert_close(in_graph, eager, rtol=0, atol=0)


def test_keys_are_split_only_in_graphs_that_do_not_fill_the_gpu() -> None:
    """The stand-in has 4 multiprocessors, and the model 2 KV heads: 4 rows fill it."""
    made = make(60, 4)
    for size, disables in ((4, False), (64, True)):
        captured(made, 60, size)
        assert made.last_plan("mixed")["disable_split_kv"] is disables
