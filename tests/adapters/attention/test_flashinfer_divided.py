"""Decodes of requests with unequal contexts: the parts of keys, and that they add up."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.attention.flashinfer.divided import Parts, is_uneven
from adapters.attention.flashinfer.tables import PageTables
from engine.worker.model.layout import padded
from engine.worker.ports import StepLimits
from tests.adapters.attention.flashinfer_cases import Made, Paged, make

H200 = 132  # multiprocessors
LONG = Paged(((3000, 1), (30, 1), (0, 1), (17, 1), (900, 1)), 4)
EQUAL = Paged(((30, 1),) * 5, 4)
LIMITS = StepLimits(max_requests=8, max_tokens=128, max_model_len=4096)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 3000) | st.just(1), min_size=1, max_size=20),
    page=st.sampled_from([1, 3, 16]),
)
def test_parts_cover_the_pages_of_each_row_and_none_is_longer_than_the_mean(
    lengths: list[int], page: int
) -> None:
    layout = Paged(tuple((length - 1, 1) for length in lengths), page).layout()
    tables = PageTables.of(layout)
    parts, size = Parts.of(tables, page), len(lengths)
    assert len(parts.rows) == len(parts.tables.kv_len) == 2 * size
    mean = -(-tables.num_pages // size)
    assert np.diff(parts.tables.kv_indptr).max() <= mean
    assert parts.tables.kv_indptr[parts.first].tolist() == tables.kv_indptr.tolist()
    for row, length in enumerate(lengths):
        mine = slice(parts.first[row], parts.first[row + 1])
        assert parts.tables.kv_len[mine].sum() == length
        assert (parts.tables.kv_len[mine] > 0).all()
        assert (parts.rows[mine] == row).all()
    assert not parts.tables.kv_len[parts.first[-1] :].any()


def found(made: Made, step: Paged, *, divides: bool) -> torch.Tensor:
    layout = padded(step.layout(), 8, spare_block=step.num_pages)
    made.attention.plan_captured(layout, divides=divides)
    made.stand_in.catch_up()
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.split(torch.randn((8, 8, 8), generator=generator), [4, 2, 2], dim=1)
    return made.attention.run(0, q, k, v, None)[: len(step.requests)]


@pytest.mark.parametrize("step", [LONG, EQUAL, Paged(((2000, 1),), 4)], ids=str)
def test_divided_requests_are_attended_as_whole_ones(step: Paged) -> None:
    outs = []
    for divides in (False, True):
        made = make(step.num_pages, 4, limits=LIMITS)
        assert made.attention.may_divide(8)
        outs.append(found(made, step, divides=divides))
        assert divides == ("merge_parts" in [name for name, _ in made.stand_in.calls])
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_a_graph_reads_the_same_addresses_whatever_the_lengths() -> None:
    step = Paged(LONG.requests, 4, seed=1)
    made = make(step.num_pages, 4, limits=LIMITS)
    baked = set()
    for one in (EQUAL, step, LONG):
        layout = padded(one.layout(), 8, spare_block=step.num_pages)
        baked.add(made.attention.plan_captured(layout, divides=True))
        found(made, one, divides=True)
    assert len(baked) == 1
    firsts = [given["first"].data_ptr() for name, given in made.stand_in.calls if "merge" in name]
    assert len(set(firsts)) == 1


def test_a_step_is_divided_if_its_longest_request_keeps_the_others_waiting() -> None:
    """On an H200 with Llama's 8 KV heads."""
    for lengths, wanted in (
        ([1024] * 64, False),
        ([1024] * 40 + [32768], True),
        ([1024] * 64 + [131072], True),
        ([32768] * 32 + [1024] * 32, False),
        ([100] * 60 + [2000], False),  # nothing to gain
    ):
        assert is_uneven(np.array(lengths, dtype=np.int32), 8, H200) == wanted
    step = Paged(((4000, 1), *LONG.requests[1:]), 4)
    made = make(step.num_pages, 4, limits=LIMITS)
    assert made.attention.divides(padded(step.layout(), 8, spare_block=step.num_pages))
    assert not made.attention.divides(padded(EQUAL.layout(), 8, spare_block=step.num_pages))
    prompt = Paged(((3900, 1), (0, 7)), 4).layout()
    assert not made.attention.divides(padded(prompt, 8, spare_block=step.num_pages))


@pytest.mark.parametrize(
    ("changes", "size", "wanted"),
    [
        ({}, 8, True),
        ({}, 4, False),  # FlashInfer divides these
        ({"window": 9}, 8, False),
        ({"is_batch_invariant": True}, 8, False),
        ({"capability": (9, 0), "dim": 64}, 4, True),  # XQA does not, so FA2 computes them
        ({"capability": (9, 0), "dim": 64}, 1, False),
    ],
)
def test_only_steps_have_a_second_graph_whose_keys_are_not_divided_by_length(
    changes: dict[str, Any], size: int, wanted: bool
) -> None:
    half = torch.bfloat16
    made = make(600, 16, limits=LIMITS, dtype=half, kv_dtype=half, **changes)
    assert made.attention.may_divide(size) == wanted
    if "capability" in changes and wanted:
        layout = padded(Paged(((900, 1), (3, 1)), 16).layout(), size, spare_block=600)
        made.attention.plan_captured(layout, divides=True)
        assert made.stand_in.calls[-1][0] == "captured", "FA2's"


def test_without_the_kernel_the_second_graph_is_like_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks may have the kernel, and all capture the same graphs."""
    monkeypatch.setattr("tests.flashinfer_stand_in.StandIn.merge_parts", lambda self: None)
    made = make(LONG.num_pages, 4, limits=LIMITS)
    assert made.attention.may_divide(8)
    expected = found(made, LONG, divides=False)
    assert torch.equal(found(made, LONG, divides=True), expected)
    assert "merge_parts" not in [name for name, _ in made.stand_in.calls]


def test_ranks_with_other_measurements_have_the_same_second_graphs() -> None:
    """They capture them together, with their all-reduces."""
    half, kept = torch.bfloat16, []
    for slower in ("xqa", "captured"):
        made = make(600, 16, limits=LIMITS, dtype=half, kv_dtype=half, capability=(9, 0), dim=64)
        made.stand_in.slowness |= {"xqa": 1.0, "captured": 1.0, slower: 2.0}
        layout = padded(Paged(((900, 1), (3, 1)), 16).layout(), 4, spare_block=600)
        made.attention.plan_captured(layout)
        assert (made.stand_in.calls[-1][0] == "captured") == (slower == "xqa")
        kept.append([made.attention.may_divide(size) for size in (1, 2, 4, 8)])
    assert kept == [[False, True, True, True]] * 2
