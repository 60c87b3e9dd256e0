from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapters.attention.flashinfer.tables import PageTableArena, PageTableArenas, TableSizes
from engine.worker.model.layout import padded
from engine.worker.ports import StepLimits
from tests.adapters.attention.flashinfer_cases import Paged, decodes, make, paged, requests
from tests.flashinfer_stand_in import StandIn

NAMES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


def slots_of(
    plan: Mapping[str, Tensor], i: int, page_size: int, names: tuple[str, ...]
) -> list[int]:
    """The slots that FlashInfer reads for request i, in order."""
    indptr, indices, last_page_len = (plan[name].tolist() for name in names)
    pages = indices[indptr[i] : indptr[i + 1]]
    counts = [page_size] * (len(pages) - 1) + [last_page_len[i]]
    return [
        page * page_size + offset
        for page, count in zip(pages, counts, strict=True)
        for offset in range(count)
    ]


@settings(deadline=None, max_examples=60)
@given(step=paged(requests), is_invariant=st.booleans())
def test_one_launch_reads_the_tokens_of_each_request_in_order(
    step: Paged, is_invariant: bool
) -> None:
    """In batch-invariant mode there are empty requests behind the others."""
    made = make(
        step.num_pages, step.page_size, is_batch_invariant=is_invariant, has_decode_kernels=False
    )
    made.attention.plan(step.layout())
    made.stand_in.catch_up()
    plan = made.last_plan("mixed")
    rows, count = [new for _, new in step.requests], len(step.requests)
    empty = [0] * (sum(rows) - count) if is_invariant else []
    assert plan["qo_indptr"].diff().tolist() == rows + empty
    assert plan["seq_lens"].tolist() == [sum(request) for request in step.requests] + empty
    for i in range(count):
        assert slots_of(plan, i, step.page_size, NAMES) == step.slots(i)
    assert (plan["page_size"], plan["causal"], plan["window_left"]) == (step.page_size, True, -1)


@settings(deadline=None, max_examples=40)
@given(step=paged(decodes))
def test_padding_reads_one_token_of_the_spare_page(step: Paged) -> None:
    made = make(step.num_pages, step.page_size, has_decode_kernels=False)
    count = len(step.requests)
    made.attention.plan_captured(padded(step.layout(), 8, spare_block=step.num_pages))
    made.stand_in.catch_up()
    plan = made.last_plan("captured")
    names = ("indptr", "indices", "last_page_len")
    for i in range(8):
        spare = [step.num_pages * step.page_size]
        expected = step.slots(i) if i < count else spare
        assert slots_of(plan, i, step.page_size, names) == expected
    assert plan["seq_lens"].tolist()[count:] == [1] * (8 - count)


def test_sizes_hold_the_largest_step_and_a_graph_a_little_larger() -> None:
    sizes = TableSizes.of(
        StepLimits(max_requests=33, max_tokens=40, max_model_len=100), page_size=16
    )
    assert sizes == TableSizes(requests=64, tokens=104, pages=64 * 7, rows=64)


def test_an_arena_keeps_what_it_was_given_until_it_is_entered_again() -> None:
    stand_in = StandIn()
    with PageTableArena(stand_in.pinned(256), stand_in.event()) as arena:
        first = arena.put(np.arange(5, dtype=np.int32))
        second = arena.put(np.arange(3, dtype=np.int64) - 7)
        third = arena.put(np.arange(10, dtype=np.int32)[::2])
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.tolist() == [-7, -6, -5]
    assert third.tolist() == [0, 2, 4, 6, 8]
    with arena:
        assert arena.put(np.array([9], dtype=np.int32)).data_ptr() == first.data_ptr()


def test_an_arena_is_not_entered_before_the_device_has_uploaded_from_it() -> None:
    stand_in = StandIn()
    arenas = PageTableArenas(
        [PageTableArena(stand_in.pinned(64), stand_in.event()) for _ in range(2)]
    )
    target = stand_in.on_device(3, torch.int32)
    for turn in range(5):
        with arenas.next() as arena:
            assert stand_in.is_done(max(0, turn - 1)), "the step two before is fetched"
            assert not turn or not stand_in.is_done(turn), "the step before is not"
            stand_in.copy(target, arena.put(np.full(3, turn, dtype=np.int32)))
    assert stand_in.log == ["waited"] * 3
    stand_in.catch_up()
    assert target.tolist() == [4, 4, 4]


def test_a_step_beyond_its_limits_is_our_own_fault() -> None:
    stand_in = StandIn()
    with (
        PageTableArena(stand_in.pinned(16), stand_in.event()) as arena,
        pytest.raises(AssertionError, match="larger than its limits"),
    ):
        arena.put(np.arange(5, dtype=np.int32))
