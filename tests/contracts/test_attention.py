from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adapters.attention import BACKENDS
from engine.media import EntryMedia, ImageRows
from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.attention import paged_kernels
from engine.worker.cpu.kernels.dtypes import dtype_code
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import AttentionSpec, KVTensors, ModelShape, RopeAngles
from tests.attention_backends import CONTRACTED, ON_CPU, cache_for, holds, maker

LAYERS = 2
MAX_POSITIONS = 4096


@pytest.fixture(params=CONTRACTED)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool() -> NativeThreadPool:
    return NativeThreadPool(2)


@dataclass(frozen=True)
class Case:
    """Requests as (tokens cached before, new tokens), in the order of the step."""

    requests: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 4
    window: int | None = None
    rotated: int | None = None  # dimensions of a head, None for no RoPE
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    values_from: int | None = None

    @property
    def parts(self) -> list[int]:
        """Heads of q, k and v, adjacent in the rows of a step."""
        values = self.kv_heads if self.values_from is None else 0
        return [self.kv_heads * self.group, self.kv_heads, values]


ROUNDING = {  # of a number, as a share of it, or in int8 of the largest beside it
    torch.float32: 0.0,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8,
    torch.int8: 0.51 / 127,
}

cases = st.builds(
    Case,
    requests=st.lists(
        st.tuples(st.integers(0, 70), st.integers(1, 40))
        | st.tuples(st.integers(0, 70), st.just(1)),
        min_size=1,
        max_size=6,
    ).map(tuple),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4, 7]),
    head_dim=st.sampled_from([8, 16, 20, 64]),
    block_size=st.sampled_from([1, 4, 16, 32]),
    window=st.none() | st.integers(1, 40),
    rotated=st.sampled_from([None, 4, 8]),
    soft_cap=st.none() | st.floats(0.5, 60),
    has_sinks=st.booleans(),
    dtype=st.sampled_from(list(ROUNDING)),
    seed=st.integers(0, 1000),
    values_from=st.sampled_from([None, None, 0, 3, 4, 7]),
)


def expected_rows(
    q: Tensor, k: Tensor, v: Tensor, case: Case, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Textbook attention in float64 of the last rows of one request's whole history."""
    k, v = (t.double().repeat_interleave(case.group, dim=1) for t in (k, v))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (case.window or len(k)))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if case.soft_cap is not None:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    totals = weights.sum(-1, keepdim=True)
    if sinks is not None:
        totals = totals + sinks.double().exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / totals, v)


def split(fused: Tensor, case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    q, k, v = torch.split(fused, case.parts, dim=1)
    return q, k, v if case.values_from is None else None


def stored(cache: KVTensors, layer: int) -> list[Tensor]:
    """Keys of a layer, and values unless they are a part of these, as numbers `[num_blocks,
    block_size, kv_heads, dim]`."""
    parts = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
    found = [
        part[layer].float() * (scales[layer][..., None] if scales else 1)
        for part, scales in parts
        if part
    ]
    return [each.clone() for each in found]


def rotated(heads: Tensor, rope: RopeAngles | None) -> Tensor:
    """Each pair of the halves of what is rotated as a complex number, times that of its angle."""
    if rope is None:
        return heads
    size = 2 * rope.cos.shape[1]
    pairs = torch.complex(*heads[..., :size].double().chunk(2, dim=-1))
    pairs = pairs * torch.complex(rope.cos.double(), rope.sin.double())[:, None]
    return torch.cat((pairs.real, pairs.imag, heads[..., size:].double()), dim=-1).float()


IN_PAIRS = (
    *paged_kernels.BY_DTYPE_IN_PAIRS.values(),
    paged_kernels.attend_rows_bfloat16_in_pairs,
)


def tolerance_of(name: str, case: Case) -> float:
    """AMX multiplies floats as sums of two bfloat16 numbers, AVX-512 BF16 rounds them to one: twice
    the largest error of 2,000 random cases. The numbers of `noisy_cache` in int8 are larger."""
    code, dim = dtype_code(case.dtype), case.head_dim
    kernel = (
        paged_kernels.attend_kernel(code, case.group, dim, case.block_size)
        if case.values_from is None
        else paged_kernels.attend_rows_kernel(code, dim, dim - case.values_from, case.block_size)
    )
    if name == "cpu" and kernel in IN_PAIRS:
        return 8e-2 if case.dtype == torch.int8 else 4e-2
    by_amx = name == "cpu" and kernel in paged_kernels.BY_DTYPE_AND_AMX.values()
    return 4e-4 if by_amx else 2e-5


def noisy_cache(name: str, case: Case, num_blocks: int, noise: Callable[..., Tensor]) -> KVTensors:
    heads = case.kv_heads * case.group
    shape = ModelShape(LAYERS, heads, case.kv_heads, case.head_dim, 1, 1, 1, 1, MAX_POSITIONS)
    shape = replace(shape, values_from=case.values_from)
    cache = cache_for(name, shape, num_blocks, case.block_size, case.dtype)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(noise(*tensor.shape) * (40 if case.dtype == torch.int8 else 1))
    for tensor in (*cache.key_scales, *cache.value_scales):
        tensor.copy_(noise(*tensor.shape).abs() / 40)
    return cache


def check(name: str, case: Case, pool: NativeThreadPool) -> None:
    generator = torch.Generator().manual_seed(case.seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = case.kv_heads * case.group
    pages = [-(-sum(request) // case.block_size) for request in case.requests]
    cache = noisy_cache(name, case, sum(pages) + 3, noise)
    table = np.random.default_rng(case.seed).permutation(sum(pages) + 3).astype("<i4")
    tables = np.split(table[: sum(pages)], np.cumsum(pages)[:-1])
    step = Step(
        StepId(0),
        tuple(
            StepEntry(RequestId(i), cached, (0,) * new, tables[i].tobytes(), None)
            for i, (cached, new) in enumerate(case.requests)
        ),
    )
    layout = build_layout(step, LayoutLimits(1, MAX_POSITIONS, len(table), case.block_size))
    scale = case.head_dim**-0.5 * 2
    spec = AttentionSpec(
        heads,
        case.kv_heads,
        case.head_dim,
        scale,
        case.window,
        soft_cap=case.soft_cap,
        has_sinks=case.has_sinks,
        values_from=case.values_from,
    )
    attention = maker(name)(spec, cache, pool)
    sinks = noise(heads) * 2 if case.has_sinks else None
    attention.plan(layout)
    for layer in range(LAYERS):
        before = stored(cache, layer)
        fused = noise(layout.num_tokens, sum(case.parts), case.head_dim)
        q, k, v = split(fused, case)
        angles = noise(layout.num_tokens, (case.rotated or 0) // 2) * 3
        rope = RopeAngles(angles.cos(), angles.sin()) if case.rotated else None
        with torch.inference_mode():
            found = attention.run(layer, *split(fused.clone(), case), rope, sinks)
        q, k = rotated(q, rope), rotated(k, rope)
        kept = stored(cache, layer)
        keys, values = kept[0], kept[-1][..., case.values_from or 0 :]
        assert found.shape == (*q.shape[:2], values.shape[-1])
        for i, (cached, new) in enumerate(case.requests):
            rows = slice(int(layout.qo_indptr[i]), int(layout.qo_indptr[i + 1]))
            blocks = torch.from_numpy(tables[i].astype(np.int64))
            whole_k, whole_v = (t[blocks].flatten(0, 1)[: cached + new] for t in (keys, values))
            expected = expected_rows(q[rows], whole_k, whole_v, case, scale, sinks)
            near = tolerance_of(name, case)
            torch.testing.assert_close(found[rows].double(), expected, rtol=near, atol=near)
        slots = torch.from_numpy(layout.slots)
        at = slots // case.block_size, slots % case.block_size
        written = [rows_of for rows_of in (k, v) if rows_of is not None]
        for old, now, rows_of in zip(before, kept, written, strict=True):
            largest = rows_of.abs().amax(-1, keepdim=True).expand_as(rows_of)
            size = largest if case.dtype == torch.int8 else rows_of.abs()
            assert ((now[at] - rows_of).abs() <= size * ROUNDING[case.dtype] + 2e-6).all()
            old[at] = now[at]
            assert torch.equal(now, old)


@settings(deadline=None, max_examples=30)
@given(case=cases)
def test_attention_is_exact_for_ragged_batches(pool: NativeThreadPool, case: Case) -> None:
    for name in CONTRACTED:
        fitting = case if holds(name, case.dtype) else replace(case, dtype=torch.float32)
        if BACKENDS[name] not in ON_CPU:
            fitting = replace(fitting, values_from=None)
        check(name, fitting, pool)


LONG = (
    Case(((0, 1),), rotated=16),
    Case(((0, 1), (3, 1), (4, 1), (64, 1), (0, 8), (5, 9)), rotated=16),
    Case(((0, 300), (290, 33), (1000, 1)), block_size=16, head_dim=64, group=7, rotated=64),
    Case(((0, 300), (290, 33), (1000, 1)), block_size=16, head_dim=64, window=50),
    Case(((1023, 1),) * 9, kv_heads=1, head_dim=128, group=1, block_size=16),
    Case(((600, 200),), kv_heads=1, head_dim=80, group=3, block_size=16),
    Case(((700, 1), (5, 1)), kv_heads=1, head_dim=40, group=5, block_size=24, window=300),
    Case(((3000, 1), (0, 1)), kv_heads=1, head_dim=64, group=7, block_size=16),
    Case(((700, 9), (0, 90)), kv_heads=1, head_dim=128, group=8, block_size=24, window=300),
    Case(((500, 40), (90, 1)), head_dim=64, group=6, soft_cap=20.0, has_sinks=True),
    Case(((0, 300), (1000, 1)), head_dim=64, block_size=16, rotated=48, soft_cap=50.0),
    Case(((0, 300), (1000, 1)), head_dim=64, block_size=16, window=300, soft_cap=0.7),
)
LATENT = (
    Case(((0, 90), (300, 9), (1000, 1)), 1, 16, 576, 16, rotated=64, values_from=64),
    Case(((700, 1), (5, 1)), 1, 20, 288, 24, rotated=32, values_from=32),
)
ROUNDED = [
    (name, dtype)
    for name in CONTRACTED
    for dtype in ROUNDING
    # torch converts floats alike
    if holds(name, dtype) and (name != "reference" or dtype in (torch.float32, torch.int8))
]


@pytest.mark.parametrize(("name", "dtype"), ROUNDED)
def test_attention_is_exact_for_long_and_wide_batches(
    name: str, dtype: torch.dtype, pool: NativeThreadPool
) -> None:
    """On the CPU, of whose four types two compute each shape."""
    for case in LONG[ROUNDED.index((name, dtype)) % 2 :: 2] if name == "cpu" else LONG:
        check(name, replace(case, dtype=dtype), pool)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in CONTRACTED for dtype in ROUNDING if holds(name, dtype)],
)
def test_attention_to_latent_vectors_is_exact(
    name: str, dtype: torch.dtype, pool: NativeThreadPool
) -> None:
    for case in LATENT:
        check(name, replace(case, dtype=dtype), pool)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("name", [name for name in CONTRACTED if BACKENDS[name] in ON_CPU])
def test_the_tokens_of_an_image_attend_to_all_tokens_of_it(
    name: str, window: int | None, pool: NativeThreadPool
) -> None:
    """Two images in a prompt whose first tokens, and some of the first image, are in the cache,
    beside a decode and a prompt that is an image."""
    shape = ModelShape(1, 4, 2, 16, 1, 1, 1, 1, MAX_POSITIONS)
    spec = AttentionSpec(4, 2, 16, 0.25, window, sees_images=True)
    cache, table = cache_for(name, shape, 300, 4, torch.float32), np.arange(300, dtype="<i4")
    images = {0: ((20, 120), (130, 400)), 2: ((0, 90),)}  # [start, stop) in each request
    parts, places = ((60, 350), (25, 1), (0, 90)), (0, 110, 200)  # cached, new; first block
    entries = []
    for number, ((cached, new), place) in enumerate(zip(parts, places, strict=True)):
        rows = [
            ImageRows(0, max(start, cached) - cached, 0, stop - max(start, cached))
            for start, stop in images.get(number, ())
        ]
        blocks = table[place:].tobytes()
        media = EntryMedia(tuple(rows)) if rows else None
        entry = StepEntry(RequestId(number), cached, (0,) * new, blocks, None, media=media)
        entries.append(entry)
    whole = [torch.randn(sum(part), 8, 16, generator=torch.Generator()) for part in parts]
    for (cached, _), qkv, place in zip(parts, whole, places, strict=True):
        for kept, first in ((cache.keys[0], 4), (cache.values[0], 6)):
            for at in range(cached):
                kept[place + at // 4, at % 4] = qkv[at, first : first + 2]
    order = (1, 0, 2)
    limits = LayoutLimits(1, MAX_POSITIONS, 300, 4)
    layout = build_layout(Step(StepId(0), tuple(entries[number] for number in order)), limits)
    attention = maker(name)(spec, cache, pool)
    attention.plan(layout)
    fused = torch.cat([whole[number][parts[number][0] :] for number in order])
    found = attention.run(0, fused[:, :4], fused[:, 4:6], fused[:, 6:], None)
    for row, number in enumerate(order):
        q, k, v = torch.split(whole[number], [4, 2, 2], dim=1)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = distance >= 0
        for start, stop in images.get(number, ()):
            seen[start:stop, start:stop] = True
        seen &= distance < (window or MAX_POSITIONS)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.25
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v.double())[parts[number][0] :]
        rows_of = slice(int(layout.qo_indptr[row]), int(layout.qo_indptr[row + 1]))
        torch.testing.assert_close(found[rows_of].double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CONTRACTED)
def test_sinks_far_above_and_below_all_scores_are_exact(name: str, pool: NativeThreadPool) -> None:
    """As in gpt-oss, whose sinks reach 4; a huge one leaves nothing, a low one changes nothing."""
    shape = ModelShape(1, 2, 1, 16, 1, 1, 1, 1, MAX_POSITIONS)
    spec = AttentionSpec(2, 1, 16, 0.25, None, has_sinks=True)
    fused = torch.randn(300, 4, 16, generator=torch.Generator().manual_seed(1))
    entry = StepEntry(RequestId(0), 0, (0,) * 300, np.arange(80, dtype="<i4").tobytes(), None)
    attention = maker(name)(spec, cache_for(name, shape, 80, 4, torch.float32), pool)
    attention.plan(build_layout(Step(StepId(0), (entry,)), LayoutLimits(1, MAX_POSITIONS, 80, 4)))
    q, k, v = torch.split(fused, [2, 1, 1], dim=1)
    expected = expected_rows(q, k, v, Case((), kv_heads=1), 0.25)
    found = attention.run(0, q, k, v, None, torch.tensor([200.0, -200.0]))
    torch.testing.assert_close(found[:, 0], torch.zeros(300, 16), rtol=0, atol=1e-30)
    torch.testing.assert_close(found[:, 1].double(), expected[:, 1], rtol=2e-5, atol=2e-5)


def test_one_backend_runs_steps_of_different_shapes(backend: str, pool: NativeThreadPool) -> None:
    shape = ModelShape(1, 4, 2, 16, 1, 1, 1, 1, MAX_POSITIONS)
    cache = cache_for(backend, shape, 8, 4, torch.float32)
    attention = maker(backend)(AttentionSpec(4, 2, 16, 0.25, None), cache, pool)
    blocks = np.arange(8, dtype="<i4").tobytes()
    whole = torch.randn(20, 8, 16, generator=torch.Generator().manual_seed(1))
    rows = []
    for start, count in ((0, 3), (3, 1), (4, 12), (16, 1), (17, 1), (18, 2)):
        entry = StepEntry(RequestId(0), start, (0,) * count, blocks, None)
        attention.plan(
            build_layout(Step(StepId(0), (entry,)), LayoutLimits(1, MAX_POSITIONS, 8, 4))
        )
        q, k, v = torch.split(whole[start : start + count], [4, 2, 2], dim=1)
        rows.append(attention.run(0, q, k, v, None).clone())
    q, k, v = torch.split(whole, [4, 2, 2], dim=1)
    expected = expected_rows(q, k, v, Case((), kv_heads=2, group=2), 0.25)
    torch.testing.assert_close(torch.cat(rows).double(), expected, rtol=2e-5, atol=2e-5)
