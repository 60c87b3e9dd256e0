"""Attention on the CPU: a token's bits depend on no other token of the step and no thread count."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.attention.backend import CpuAttention
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.kv_tensors import CPU_KV_DTYPES, allocate
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import AttentionSpec, KVTensors, ModelShape

LENGTH = 1500  # of the long request: several spans
HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 4, 1, 32, 16, 140
SHAPE = ModelShape(1, HEADS, KV_HEADS, DIM, 1, 1, 1, 1, 4096)
TABLE = np.random.default_rng(0).permutation(BLOCKS).astype("<i4")


def rows_of(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS + 2 * KV_HEADS, DIM, generator=generator)


def run(
    attention: CpuAttention, *pieces: tuple[int, int, Tensor], first_block: int = 100
) -> list[Tensor]:
    """One step over (request, start, rows); request 0 is the long one. What each gets."""
    entries = []
    for request, start, rows in pieces:
        table = TABLE[:100] if request == 0 else TABLE[first_block + request : first_block + 40]
        entries.append(
            StepEntry(RequestId(request), start, (0,) * len(rows), table.tobytes(), None)
        )
    step = Step(StepId(0), tuple(entries))
    attention.plan(build_layout(step, LayoutLimits(1, 4096, BLOCKS, SIZE)))
    fused = torch.cat([rows for _, _, rows in pieces])
    q, k, v = torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    found = attention.run(0, q, k, v, None).clone()
    return list(torch.split(found, [len(rows) for _, _, rows in pieces]))


def opened(threads: int, dtype: torch.dtype, window: int | None) -> tuple[CpuAttention, KVTensors]:
    cache = allocate(SHAPE, 1, BLOCKS, SIZE, dtype)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, window)
    return CpuAttention(spec, cache, NativeThreadPool(threads)), cache


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [d for name, d in CPU_KV_DTYPES.items() if name != "auto"])
def test_bits_are_the_same_alone_beside_others_cut_and_divided_among_threads(
    dtype: torch.dtype, window: int | None
) -> None:
    whole, last = rows_of(LENGTH, 1), slice(LENGTH - 1, LENGTH)
    alone, cache = opened(1, dtype, window)
    (expected,) = run(alone, (0, 0, whole.clone()))
    shared, other = opened(2, dtype, window)
    starts = [0, 1, 38, 700, 701, LENGTH - 1]
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        mate = rows_of(min(9, end - start), start)
        beside, found = run(shared, (1, 0, mate), (0, start, whole[start:end].clone()))
        assert torch.equal(found, expected[start:end])
        assert len(beside) == len(mate)
    for once, again in zip(cache.in_memory_order(), other.in_memory_order(), strict=True):
        assert torch.equal(once[TABLE[:90].astype(int)], again[TABLE[:90].astype(int)])
    mates = [(i, 0, rows_of(1, i)) for i in range(1, 30)]
    (again,) = run(shared, (0, LENGTH - 1, whole[last].clone()))
    assert torch.equal(again, expected[last])
    assert torch.equal(run(shared, *mates, (0, LENGTH - 1, whole[last].clone()))[-1], again)


def test_nan_is_in_the_output_of_its_request_only() -> None:
    for dtype in CPU_KV_DTYPES.values():
        attention, _ = opened(2, dtype, None)
        bad, good = rows_of(40, 1), rows_of(40, 2)
        bad[7, HEADS, 3] = float("nan")
        spoilt, fine = run(attention, (0, 0, bad), (1, 0, good))
        assert spoilt[7:].isnan().any(dim=-1).all()
        assert fine.isfinite().all()


def test_float16_stores_larger_numbers_as_its_largest() -> None:
    attention, cache = opened(1, torch.float16, None)
    rows = rows_of(1, 1)
    rows[0, HEADS, 0], rows[0, HEADS, 1] = 1e6, -1e6
    run(attention, (0, 0, rows))
    assert cache.keys[0][TABLE[0], 0, 0, :2].tolist() == [65504, -65504]
