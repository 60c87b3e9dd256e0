"""Decodes by our kernels: the runs of keys, and that they add up to attention over all keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.attention.flashinfer.decodes import Runs, num_runs
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
    more=st.integers(1, 300),
)
def test_runs_cover_the_keys_of_each_row_and_none_is_empty_or_longer_than_the_mean(
    lengths: list[int], page: int, window: int | None, more: int
) -> None:
    tables, size = tables_of(lengths, page), len(lengths)
    table, first = Runs.of(tables, window, size + more)
    assert (len(table), len(first)) == (size + more, size + 1)
    seen = [min(length, window or length) for length in lengths]
    mean = max(64, -(-sum(seen) // more))
    for row, (length, wanted) in enumerate(zip(lengths, seen, strict=True)):
        mine = table[first[row] : first[row + 1]]
        assert (mine[:, 0] == (row if len(mine) == 1 else ~row)).all()
        assert (mine[:, 1] == tables.kv_indptr[row]).all()
        starts, ends = mine[:, 2], mine[:, 3]
        assert [int(starts[0]), int(ends[-1])] == [length - wanted, length]
        assert (starts[1:] == ends[:-1]).all()
        assert (starts < ends).all()
        assert (ends - starts).max() <= mean
        assert len(mine) == -(-wanted // mean)
    assert not table[first[-1] :].any()


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [
        ([1024] * 40 + [32768], 2185),  # 2,235 keys of each block are even
        ([1024] * 64 + [131072], 5958),
        ([1024] * 64, 1024),
        ([100] * 60 + [2000], 223),
        ([1024], 64),
        ([8192] * 16, 2731),
    ],
)
def test_on_an_h200_no_block_reads_much_more_than_others(lengths: list[int], longest: int) -> None:
    """With Llama's 8 KV heads."""
    tables = tables_of(lengths)
    table, _ = Runs.of(tables, None, num_runs(len(lengths), 8, H200))
    assert int((table[:, 3] - table[:, 2]).max()) == longest


def found(made: Made, step: Paged) -> torch.Tensor:
    layout = padded(step.layout(), 8, spare_block=step.num_pages)
    made.attention.plan_captured(layout)
    return run(made, 8)[: len(step.requests)]


def run(made: Made, rows: int) -> torch.Tensor:
    made.stand_in.catch_up()
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.split(torch.randn((8, 8, 8), generator=generator)[:rows], [4, 2, 2], dim=1)
    return made.attention.run(0, q, k, v, None)


@pytest.mark.parametrize("step", [LONG, EQUAL, Paged(((2000, 1),), 4)], ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_decodes_are_attended_as_by_flashinfer(step: Paged, window: int | None) -> None:
    outs = []
    for has_kernels in (False, True):
        made = make(step.num_pages, 4, limits=LIMITS, window=window, has_decode_kernels=has_kernels)
        outs.append(found(made, step))
        assert has_kernels == ("attend_decodes" in [name for name, _ in made.stand_in.calls])
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_eager_decodes_are_those_of_graphs() -> None:
    made = make(LONG.num_pages, 4, limits=LIMITS)
    in_graph = found(made, LONG)
    made.attention.plan(LONG.layout())
    torch.testing.assert_close(run(made, 5), in_graph, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in made.stand_in.calls[-2:]] == ["attend_decodes", "merge_runs"]


def test_a_graph_reads_the_same_addresses_whatever_the_lengths() -> None:
    step = Paged(LONG.requests, 4, seed=1)
    made = make(step.num_pages, 4, limits=LIMITS)
    for one in (EQUAL, step, LONG):
        found(made, one)
    for name, tables in (("attend_decodes", ("runs", "pages")), ("merge_runs", ("first",))):
        calls = [given for each, given in made.stand_in.calls if each == name]
        places = {tuple(given[each].data_ptr() for each in tables) for given in calls}
        assert (len(calls), len(places)) == (3, 1)
    sizes = {len(given["runs"]) for name, given in made.stand_in.calls if "attend" in name}
    assert sizes == {12}, "one run of each row, and four that fill the GPU"


def test_in_batch_invariant_mode_decodes_have_the_kernel_of_prompts() -> None:
    made = make(600, 16, limits=LIMITS, is_batch_invariant=True)
    step = Paged(((900, 1),), 16)
    made.attention.plan(step.layout())
    run(made, 1)
    made.attention.plan_captured(padded(step.layout(), 4, spare_block=600))
    run(made, 4)
    assert {name for name, _ in made.stand_in.calls} >= {"mixed", "captured", "run"}
    assert "attend_decodes" not in [name for name, _ in made.stand_in.calls]
