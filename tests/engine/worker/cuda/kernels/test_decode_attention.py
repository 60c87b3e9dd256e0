"""Attention of decodes under Triton's interpreter against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import FP8, DecodeKeys, Scoring
from tests.engine.worker.cuda.kernels.interpreted import interpreted

decodes = interpreted("decode_attention")
PAGE = 4


def noise(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def cache(pages: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values in heads narrower than their distance, with NaN in between pages."""
    made = []
    for seed in (1, 2):
        whole = torch.full((pages, PAGE + 1, heads, dim), torch.nan)
        whole[:, :PAGE] = noise(pages, PAGE, heads, dim, seed=seed)
        made.append(whole.to(dtype)[:, :PAGE])
    return made[0], made[1]


def runs_of(lengths: list[int], length: int) -> list[tuple[int, int, int, int]]:
    """Runs of at most `length` tokens; each row has eight pages more than it needs."""
    found, page = [], 0
    for row, end in enumerate(lengths):
        starts, named = range(0, end, length), ~row if end > length else row
        found += [(named, page, start, min(start + length, end)) for start in starts]
        page += -(-end // PAGE) + 8
    return found


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 17]),
    dim=st.sampled_from([64, 128, 256]),
    dtype=st.sampled_from([torch.float16, FP8]),
    cap=st.sampled_from([None, 3.0]),
    has_sinks=st.booleans(),
    run=st.sampled_from([33, 1000]),
)
def test_rows_and_their_runs(
    lengths: list[int],
    group: int,
    dim: int,
    dtype: torch.dtype,
    cap: float | None,
    has_sinks: bool,
    run: int,
) -> None:
    rows = [*runs_of(lengths, run), (0, 0, 0, 0)]
    num_pages = rows[-2][1] + 40
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).int()
    keys, values = cache(num_pages, 2, dim, dtype)
    q = noise(len(lengths), 2 * group + 1, dim, seed=3).half()[:, : 2 * group]
    read = DecodeKeys(torch.tensor(rows, dtype=torch.int32), pages)
    scoring = Scoring(dim**-0.5, cap, *((0.5, 2.0) if dtype == FP8 else (1.0, 1.0)))
    sinks = noise(2 * group, seed=4) if has_sinks else None
    results = []
    for attend in (decodes.attend_decodes, reference.attend_decodes):
        out = torch.full(q.shape, torch.nan, dtype=torch.float16)
        parts = (
            torch.full((len(rows), 2 * group, dim), torch.nan),
            torch.full((len(rows), 2 * group), torch.nan),
        )
        attend(q, keys, values, read, out, parts, scoring, sinks)
        results.append((out, *parts))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3, equal_nan=True)
    out, *found = results[0]
    is_part = read.runs[:, 0] < 0
    assert all((each.flatten(1).isnan().any(1) != is_part).all() for each in found)
    divided = torch.tensor([length > run for length in lengths])
    assert (out.flatten(1).isnan().any(1) == divided).all()


@pytest.mark.parametrize(("dim", "itemsize"), [(64, 2), (128, 2), (256, 2), (512, 2), (128, 1)])
def test_a_program_keeps_few_tokens(dim: int, itemsize: int) -> None:
    tokens, warps, stages = decodes.tiling_of(dim, itemsize)
    assert 2 * (stages - 1) * tokens * dim * itemsize <= 64 << 10
    assert tokens * dim * itemsize <= 2 * decodes.TILE_BYTES
    assert tokens in (16, 32, 64)
    assert warps in (2, 4)
