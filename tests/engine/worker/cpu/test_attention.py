from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.attention.reference import ReferenceAttention
from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.attention import backend, paged_kernels
from engine.worker.cpu.attention.backend import CpuAttention
from engine.worker.cpu.kernels.dtypes import dtype_code
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.kv_tensors import CPU_KV_DTYPES, allocate
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    KVTensors,
    MakesAttention,
    ModelShape,
)

LENGTH = 1500  # of the long request: several spans
HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 8, 1, 64, 16, 140
SHAPE = ModelShape(1, HEADS, KV_HEADS, DIM, 1, 1, 1, 1, 4096)
TABLE = np.random.default_rng(0).permutation(BLOCKS).astype("<i4")


def rows_of(count: int, seed: int, values_from: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    heads = HEADS + (2 if values_from is None else 1) * KV_HEADS
    return torch.randn(count, heads, DIM, generator=generator)


def run(
    attention: AttentionBackend, *pieces: tuple[int, int, Tensor], first_block: int = 100
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
    q, k, *values = torch.split(fused, [HEADS, *[KV_HEADS] * (fused.shape[1] - HEADS)], dim=1)
    found = attention.run(0, q, k, values[0] if values else None, None).clone()
    return list(torch.split(found, [len(rows) for _, _, rows in pieces]))


def opened(
    threads: int, dtype: torch.dtype, window: int | None, values_from: int | None = None
) -> tuple[CpuAttention, KVTensors]:
    cache = allocate(replace(SHAPE, values_from=values_from), 1, BLOCKS, SIZE, dtype)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, window, values_from=values_from)
    return CpuAttention(spec, cache, NativeThreadPool(threads)), cache


@pytest.mark.parametrize(("window", "values_from"), [(None, None), (700, None), (None, 32)])
@pytest.mark.parametrize("dtype", CPU_KV_DTYPES.values())
def test_bits_are_the_same_alone_beside_others_cut_and_divided_among_threads(
    dtype: torch.dtype, window: int | None, values_from: int | None
) -> None:
    whole, last = rows_of(LENGTH, 1, values_from), slice(LENGTH - 1, LENGTH)
    alone, cache = opened(1, dtype, window, values_from)
    (expected,) = run(alone, (0, 0, whole.clone()))
    shared, other = opened(2, dtype, window, values_from)
    starts = [0, 1, 38, 700, 701, LENGTH - 1]
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        mate = rows_of(min(9, end - start), start, values_from)
        beside, found = run(shared, (1, 0, mate), (0, start, whole[start:end].clone()))
        assert torch.equal(found, expected[start:end])
        assert len(beside) == len(mate)
    for once, again in zip(cache.in_memory_order(), other.in_memory_order(), strict=True):
        assert torch.equal(once[TABLE[:90].astype(int)], again[TABLE[:90].astype(int)])
    mates = [(i, 0, rows_of(1, i, values_from)) for i in range(1, 30)]
    (again,) = run(shared, (0, LENGTH - 1, whole[last].clone()))
    assert torch.equal(again, expected[last])
    assert torch.equal(run(shared, *mates, (0, LENGTH - 1, whole[last].clone()))[-1], again)


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES.values())
@pytest.mark.parametrize("length", [100, 1500])
def test_bits_are_the_same_if_threads_share_the_query_heads_of_a_decode(
    dtype: torch.dtype, length: int
) -> None:
    whole, found = rows_of(length, 1, 32), []
    for threads in (1, 2, 3):
        attention, _ = opened(threads, dtype, None, 32)
        run(attention, (0, 0, whole[:-1].clone()))
        found += run(attention, (0, length - 1, whole[-1:].clone()))
        assert attention._parts == (2 if threads > 1 and length == 100 else 1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("window", [None, 700])
def test_few_decodes_are_cut_like_many(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, _ = opened(1, torch.float32, window)
    table = TABLE[:100].tobytes()
    starts = [0, 1, 699, 700, 1500]
    entries = tuple(StepEntry(RequestId(i), at, (0,), table, None) for i, at in enumerate(starts))
    layout = build_layout(Step(StepId(0), entries), LayoutLimits(1, 4096, BLOCKS, SIZE))
    few = attention._cut(layout)
    monkeypatch.setattr(backend, "FEW_DECODES", 0)
    assert few.tolist() == attention._cut(layout).tolist()


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", CPU_KV_DTYPES.values())
def test_outputs_are_those_of_float64(dtype: torch.dtype, window: int | None) -> None:
    attention, cache = opened(2, dtype, window)
    rows = rows_of(LENGTH, 1)
    (found,) = run(attention, (0, 0, rows.clone()))
    some = torch.arange(0, LENGTH, 7)
    q = rows[some, :HEADS].double()
    k, v = (
        tensors[0][TABLE[:100].astype(int)].double()[:, :, 0].reshape(-1, DIM)[:LENGTH]
        for tensors in (cache.keys, cache.values)
    )
    if cache.key_scales:
        k_scales, v_scales = (
            tensors[0][TABLE[:100].astype(int)].double().reshape(-1, 1)[:LENGTH]
            for tensors in (cache.key_scales, cache.value_scales)
        )
        k, v = k * k_scales, v * v_scales
    scores = torch.einsum("qhd,kd->hqk", q, k) * DIM**-0.5
    distance = some.unsqueeze(1) - torch.arange(LENGTH)
    is_seen = (distance >= 0) & (distance < (window or LENGTH))
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
    expected = torch.einsum("hqk,kd->qhd", weights, v)
    kernel = paged_kernels.attend_kernel(dtype_code(dtype), HEADS // KV_HEADS, DIM, SIZE)
    by_amx = kernel in paged_kernels.BY_DTYPE_AND_AMX.values()
    in_pairs = kernel in paged_kernels.BY_DTYPE_IN_PAIRS.values()
    rounded = 1e-2 if dtype is torch.int8 else 5e-3  # of a weight of 1, int8's scale is rounded
    near = 2e-4 if by_amx else rounded if in_pairs else 1e-5
    torch.testing.assert_close(found[some].double(), expected, rtol=0, atol=near)


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES.values())
def test_pages_before_the_window_are_not_read(dtype: torch.dtype) -> None:
    attention, cache = opened(1, dtype, 300)
    rows = rows_of(LENGTH, 1)
    (expected,) = run(attention, (0, 0, rows.clone()))
    start = LENGTH - 70
    gone = TABLE[: (start + 1 - 300) // SIZE].astype(int)
    for tensor in cache.in_memory_order():
        tensor[gone] = torch.nan if tensor.is_floating_point() else 127
    (found,) = run(attention, (0, start, rows[start:].clone()))
    assert torch.equal(found, expected[start:])


def test_nan_is_in_the_output_of_its_request_only() -> None:
    for dtype in CPU_KV_DTYPES.values():
        attention, _ = opened(2, dtype, None)
        bad, good = rows_of(40, 1), rows_of(40, 2)
        bad[7, HEADS, 3] = float("nan")
        spoilt, fine = run(attention, (0, 0, bad), (1, 0, good))
        assert spoilt[7:].isnan().any(dim=-1).all()
        assert fine.isfinite().all()


@pytest.mark.parametrize("backend", [CpuAttention, ReferenceAttention])
def test_float16_stores_larger_numbers_as_its_largest(
    backend: MakesAttention,
) -> None:
    cache = allocate(SHAPE, 1, BLOCKS, SIZE, torch.float16)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, None)
    attention = backend(spec, cache, NativeThreadPool(1))
    rows = rows_of(1, 1)
    rows[0, HEADS, 0], rows[0, HEADS, 1] = 1e6, -1e6
    run(attention, (0, 0, rows))
    assert cache.keys[0][TABLE[0], 0, 0, :2].tolist() == [65504, -65504]


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES.values())
def test_bits_are_the_same_with_every_block_size(dtype: torch.dtype) -> None:
    """Blocks that tiles of 16 keys divide, or not, or that are smaller."""
    length, found = 333, []
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, None)
    for size in (16, 4, 20, 32, 48):
        num_blocks = -(-length // size)
        attention = CpuAttention(
            spec, allocate(SHAPE, 1, num_blocks, size, dtype), NativeThreadPool(1)
        )
        table = np.random.default_rng(size).permutation(num_blocks).astype("<i4").tobytes()
        for start, end in ((0, 300), (300, length)):
            step = Step(
                StepId(0), (StepEntry(RequestId(0), start, (0,) * (end - start), table, None),)
            )
            attention.plan(build_layout(step, LayoutLimits(1, 4096, num_blocks, size)))
            fused = rows_of(length, 1)[start:end]
            q, k, v = torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)
            found.append(attention.run(0, q, k, v, None).clone())
    for prompt, rest in zip(found[2::2], found[3::2], strict=True):
        assert torch.equal(prompt, found[0])
        assert torch.equal(rest, found[1])
