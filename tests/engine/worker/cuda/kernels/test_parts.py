"""The sum of attention over parts of keys under Triton's interpreter against plain torch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.cuda.kernels import reference
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import bfloat16_noise as noise

parts = interpreted("parts")


@settings(deadline=None, max_examples=10)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    dim=st.sampled_from([64, 128]),
    spread=st.sampled_from([0.1, 30.0]),
    has_sinks=st.booleans(),
)
def test_rows_of_any_number_of_parts(
    counts: list[int], heads: int, dim: int, spread: float, has_sinks: bool
) -> None:
    first = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    total = int(first[-1])
    found = noise(total + 2, heads, dim)
    found[total:] = torch.nan  # parts of no row
    sums = noise(total + 2, heads, seed=1, dtype=torch.float32) * spread
    one, other = (torch.empty(len(counts), heads, dim, dtype=torch.bfloat16) for _ in range(2))
    sinks = noise(heads, seed=2, dtype=torch.float32) * spread if has_sinks else None
    parts.merge_parts(found, sums, first, one, sinks)
    reference.merge_parts(found, sums, first, other, sinks)
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    kept = torch.full_like(one, torch.nan)
    parts.merge_runs(found, sums, first, kept, sinks)
    for row, count in enumerate(counts):
        assert torch.equal(kept[row], one[row]) if count > 1 else bool(kept[row].isnan().all())
    reference.merge_runs(found, sums, first, kept.fill_(0), sinks)
    for row, count in enumerate(counts):
        assert torch.equal(kept[row], other[row] if count > 1 else torch.zeros_like(kept[row]))


def test_sinks_of_rows_with_one_part_need_no_kernel() -> None:
    found, sums = noise(5, 3, 64), noise(5, 3, seed=1, dtype=torch.float32) * 9
    sums[2] = -torch.inf  # no keys
    found[2], sinks = 0, torch.tensor([-200.0, 0.5, 200.0])
    one, other = (torch.empty_like(found) for _ in range(2))
    first = torch.arange(6, dtype=torch.int32)
    reference.add_sinks(found, sums, first, one, sinks)
    reference.merge_parts(found, sums, first, other, sinks)
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-6)


def test_parts_add_up_to_attention_over_all_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, 2, 64, generator=generator) for size in (1, 90, 90))
    scores, sinks = torch.einsum("qhd,khd->hqk", q, k), torch.tensor([3.0, 200.0])
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    weights = torch.cat((scores, sinks[:, None, None]), dim=-1).softmax(-1)[..., :-1]
    with_sinks = torch.einsum("hqk,khd->qhd", weights, v)
    found, sums = [], []
    for keys in (slice(0, 40), slice(40, 41), slice(41, 90)):
        some = scores[..., keys]
        found.append(torch.einsum("hqk,khd->qhd", some.softmax(-1), v[keys]))
        sums.append(some.logsumexp(-1).t() / reference.LN_2)
    out = torch.empty(1, 2, 64)
    first = torch.tensor([0, 3], dtype=torch.int32)
    for merge in (parts.merge_parts, reference.merge_parts):
        merge(torch.cat(found), torch.cat(sums), first, out)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        merge(torch.cat(found), torch.cat(sums), first, out, sinks)
        torch.testing.assert_close(out, with_sinks, rtol=1e-5, atol=1e-5)
