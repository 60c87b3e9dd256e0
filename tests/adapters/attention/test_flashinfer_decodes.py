"""Decodes by our kernels: the runs of keys, and that they add up to attention over all keys."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.attention.flashinfer.decodes import Runs, divided_runs, is_uneven
from adapters.attention.flashinfer.tables import PageTables
from engine.worker.model.layout import padded
from engine.worker.ports import StepLimits
from tests.adapters.attention.flashinfer_cases import Made, Paged, make

H200 = 132  # multiprocessors
LONG = Paged(((3000, 1), (30, 1), (0, 1), (17, 1), (900, 1)), 4)
EQUAL = Paged(((30, 1),) * 5, 4)
LIMITS = StepLimits(max_requests=8, max_tokens=128, max_model_len=4096)


def tables_of(lengths: list[int], page: int = 16) -> PageTables:
    return PageTables.of(Paged(tuple((length - 1, 1) for length in lengths), page).layout())


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 3000) | st.just(1), min_size=1, max_size=20),
    page=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([None, 1, 100]),
    more=st.integers(0, 300),
)
def test_runs_cover_the_keys_of_each_row_and_none_is_empty_or_longer_than_the_mean(
    lengths: list[int], page: int, window: int | None, more: int
) -> None:
    tables, size = tables_of(lengths, page), len(lengths)
    table, first = Runs.of(tables, window, size + more)
    assert (len(table), len(first)) == (size + more, size + 1)
    seen = [min(length, window or length) for length in lengths]
    mean = max(64, -(-sum(seen) // more)) if more else max(seen)
    for row, (length, wanted) in enumerate(zip(lengths, seen, strict=True)):
        mine = table[first[row] : first[row + 1]]
        assert (mine[:, 0] == row).all()
        assert (mine[:, 1] == tables.kv_indptr[row]).all()
        starts, ends = mine[:, 2], mine[:, 3]
        assert [int(starts[0]), int(ends[-1])] == [length - wanted, length]
        assert (starts[1:] == ends[:-1]).all()
        assert (starts < ends).all()
        assert (ends - starts).max() <= mean
    assert not table[first[-1] :].any()


def test_a_long_request_beside_many_is_read_by_many_blocks() -> None:
    """40 decodes of 1,024 tokens and one of 32,768, on an H200: 2,235 keys a block are even."""
    tables = tables_of([1024] * 40 + [32768])
    assert is_uneven(tables.kv_len, 8, H200)
    table, _ = Runs.of(tables, None, divided_runs(41, 8, H200))
    assert int((table[:, 3] - table[:, 2]).max()) == 1725
    alone, _ = Runs.of(tables_of([1024]), None, divided_runs(1, 8, H200))
    assert int((alone[:, 3] - alone[:, 2]).max()) == 64


def found(made: Made, step: Paged, *, divides: bool) -> torch.Tensor:
    layout = padded(step.layout(), 8, spare_block=step.num_pages)
    made.attention.plan_captured(layout, divides=divides)
    return run(made, 8)[: len(step.requests)]


def run(made: Made, rows: int) -> torch.Tensor:
    made.stand_in.catch_up()
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.split(torch.randn((8, 8, 8), generator=generator)[:rows], [4, 2, 2], dim=1)
    return made.attention.run(0, q, k, v, None)


@pytest.mark.parametrize("step", [LONG, EQUAL, Paged(((2000, 1),), 4)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_divided_requests_are_attended_as_whole_ones(step: Paged, window: int | None) -> None:
    made = make(step.num_pages, 4, limits=LIMITS, window=window, has_decode_kernels=False)
    wanted = found(made, step, divides=False)
    for divides in (False, True):
        if divides and window is not None:
            continue
        made = make(step.num_pages, 4, limits=LIMITS, window=window)
        assert made.attention.may_divide(8) == (window is None)
        torch.testing.assert_close(found(made, step, divides=divides), wanted, rtol=1e-5, atol=1e-5)
        assert divides == ("merge_parts" in [name for name, _ in made.stand_in.calls])


def test_eager_decodes_are_those_of_graphs() -> None:
    made = make(LONG.num_pages, 4, limits=LIMITS)
    in_graph = found(made, LONG, divides=True)
    made.attention.plan(LONG.layout())
    torch.testing.assert_close(run(made, 5), in_graph, rtol=1e-5, atol=1e-5)
    assert made.stand_in.calls[-1][0] == "attend_decodes", "five rows fill the GPU"
    few = Paged(LONG.requests[:2], 4)
    made.attention.plan(few.layout())
    run(made, 2)
    assert [name for name, _ in made.stand_in.calls[-2:]] == ["attend_decodes", "merge_parts"]


def test_a_graph_reads_the_same_addresses_whatever_the_lengths() -> None:
    step = Paged(LONG.requests, 4, seed=1)
    made = make(step.num_pages, 4, limits=LIMITS)
    for one in (EQUAL, step, LONG):
        found(made, one, divides=True)
    for name, tables in (("attend_decodes", ("runs", "pages")), ("merge_parts", ("first",))):
        calls = [given for each, given in made.stand_in.calls if each == name]
        places = {tuple(given[each].data_ptr() for each in tables) for given in calls}
        assert (len(calls), len(places)) == (3, 1)
    sizes = {len(given["runs"]) for name, given in made.stand_in.calls if "attend" in name}
    assert sizes == {16}


def test_a_step_is_divided_if_its_longest_request_keeps_the_others_waiting() -> None:
    """On an H200 with Llama's 8 KV heads."""
    for lengths, wanted in (
        ([1024] * 64, False),
        ([1024] * 40 + [32768], True),
        ([1024] * 64 + [131072], True),
        ([32768] * 32 + [1024] * 32, False),
        ([100] * 60 + [500], False),  # nothing to gain
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
        ({}, 4, False),  # the first graph divides these
        ({"window": 9}, 8, False),
        ({"is_batch_invariant": True}, 8, False),
    ],
)
def test_only_steps_have_a_second_graph_whose_keys_are_not_divided_by_the_first(
    changes: dict[str, Any], size: int, wanted: bool
) -> None:
    half = torch.bfloat16
    made = make(600, 16, limits=LIMITS, dtype=half, kv_dtype=half, **changes)
    assert made.attention.may_divide(size) == wanted


def test_in_batch_invariant_mode_decodes_have_the_kernel_of_prompts() -> None:
    made = make(600, 16, limits=LIMITS, is_batch_invariant=True)
    step = Paged(((900, 1),), 16)
    made.attention.plan(step.layout())
    run(made, 1)
    made.attention.plan_captured(padded(step.layout(), 4, spare_block=600))
    run(made, 4)
    assert {name for name, _ in made.stand_in.calls} >= {"mixed", "captured", "run"}
    assert "attend_decodes" not in [name for name, _ in made.stand_in.calls]


def test_without_the_kernels_the_second_graph_is_like_the_first() -> None:
    """Other ranks may have the kernels, and all capture the same graphs."""
    made = make(LONG.num_pages, 4, limits=LIMITS, has_decode_kernels=False)
    assert made.attention.may_divide(8)
    expected = found(made, LONG, divides=False)
    assert torch.equal(found(made, LONG, divides=True), expected)
    assert "attend_decodes" not in [name for name, _ in made.stand_in.calls]
