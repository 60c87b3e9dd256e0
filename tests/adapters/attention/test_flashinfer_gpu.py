"""FlashInfer's kernels through our calls, against float32; on a GPU only."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.attention.flashinfer.workspace import eager_bytes
from engine.worker.ports import RopeAngles
from tests.adapters.attention.flashinfer_cases import Paged
from tests.adapters.attention.flashinfer_on_gpu import FP8, ON_GPU, OnGpu, Shape, check_close

pytestmark = ON_GPU

LLAMA = Shape(32, 8, 128)
SHAPES = [
    Shape(12, 12, 64),  # GPT-2
    Shape(14, 2, 64),  # Qwen2.5-0.5B
    Shape(32, 8, 64),
    Shape(28, 4, 128),
    LLAMA,
    Shape(16, 8, 128),
    Shape(40, 8, 128),
]
LATENTS = [  # V2-Lite, GLM-4.7-Flash, V3, and V2-Lite in float16 and pages of one token
    *(Shape(heads, 1, 576, values_from=64) for heads in (16, 20, 128)),
    Shape(16, 1, 576, page_size=1, dtype=torch.float16, values_from=64),
]
VARIANTS = [
    replace(LLAMA, dtype=torch.float16),
    replace(LLAMA, page_size=1),
    replace(LLAMA, page_size=32),
    replace(LLAMA, window=100),
    replace(LLAMA, kv_dtype=FP8),
    replace(LLAMA, kv_dtype=FP8, scales=(0.5, 2.0)),
    Shape(64, 8, 64, window=128, has_sinks=True),  # gpt-oss
    Shape(32, 32, 96),  # Phi-3-mini
    Shape(32, 32, 80),  # Phi-2
    Shape(16, 16, 192),  # MLA, expanded
    Shape(8, 1, 512),  # Gemma 4
    *LATENTS,
]


def edges(page_size: int) -> tuple[tuple[int, int], ...]:
    """Decodes whose contexts end before, at and behind pages and tiles; then chunks of all."""
    lengths = (1, page_size - 1, page_size, page_size + 1, 127, 128, 129, 4097)
    decodes = tuple((length - 1, 1) for length in lengths if length)
    chunks = tuple((37 * i, count) for i, count in enumerate((2, 16, 17, 65, 513)))
    return decodes + chunks


STEPS = {
    "one decode": ((700, 1),),
    "77 equal decodes": ((1024, 1),) * 77,
    "256 mixed lengths": tuple(((i * 37) % 3000, 1) for i in range(256)),
    "60 decodes and a chunk": (*(((i * 53) % 2000, 1) for i in range(60)), (0, 2048)),
    "a chunk behind a long prefix": ((7000, 512),),
    "contexts of 33 to 32,768": ((32, 1), (4095, 1), (32767, 1), (300, 33)),
    "first chunks": ((0, 300), (0, 700), (0, 16), (0, 1000)),
}


def check(shape: Shape, step: Paged) -> None:
    layout = step.layout()
    gpu = OnGpu(shape, step.num_pages)
    gpu.fill(layout)
    gpu.attention.plan(layout)
    q, k, v = gpu.step(layout.num_tokens)
    found = gpu.run(q, k, v)
    check_close(found, gpu.expected(layout, q), shape.dtype)


@pytest.mark.parametrize("shape", SHAPES + VARIANTS, ids=str)
def test_edges_of_pages_and_tiles_are_attended_as_in_float32(shape: Shape) -> None:
    check(shape, Paged(edges(shape.page_size), shape.page_size, seed=1))


@pytest.mark.parametrize("shape", [LLAMA, *LATENTS[:2]], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_steps_as_they_come_are_attended_as_in_float32(name: str, shape: Shape) -> None:
    check(shape, Paged(STEPS[name], 16, seed=2))


def test_shared_pages_are_read_by_all() -> None:
    check(LLAMA, Paged(((100, 1), (90, 1), (64, 30), (80, 50)), 16, num_shared=4))


def test_heads_are_turned_as_the_step_says() -> None:
    step = Paged(((30, 1), (0, 40)), 16)
    layout, gpu = step.layout(), OnGpu(LLAMA, step.num_pages)
    gpu.fill(layout)
    gpu.attention.plan(layout)
    q, k, v = gpu.step(layout.num_tokens)
    angles = gpu.noise(layout.num_tokens, LLAMA.dim // 2) * 3
    turn = RopeAngles(angles.cos(), angles.sin())
    pairs = (
        torch.complex(*q.double().chunk(2, dim=-1))
        * torch.polar(torch.ones_like(angles, dtype=torch.double), angles.double())[:, None]
    )
    turned = torch.cat((pairs.real, pairs.imag), dim=-1)
    found = gpu.run(q, k, v, turn)
    torch.testing.assert_close(q.double(), turned, rtol=1e-2, atol=2e-2)
    check_close(found, gpu.expected(layout, q), LLAMA.dtype)


def test_the_step_that_is_planned_ahead_does_not_touch_the_one_that_runs() -> None:
    steps = [Paged(((900 + 31 * i, 1), (64 * i, 200)), 16, seed=i) for i in range(6)]
    gpu = OnGpu(LLAMA, max(step.num_pages for step in steps))
    layouts = [step.layout() for step in steps]
    inputs = [gpu.step(layout.num_tokens) for layout in layouts]
    whole = gpu.cache.keys[0], gpu.cache.values[0]
    for cache in whole:
        cache.copy_(gpu.noise(*cache.shape))
    expected = []
    kept = [cache.clone() for cache in whole]
    for layout, (q, k, v) in zip(layouts, inputs, strict=True):
        slots = torch.from_numpy(layout.slots).cuda()
        for cache, rows in zip(whole, (k, v), strict=True):
            cache[slots // 16, slots % 16] = rows
        expected.append(gpu.expected(layout, q))
    for cache, before in zip(whole, kept, strict=True):
        cache.copy_(before)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call] # a quarter of a second
    found = []
    for layout, (q, k, v) in zip(layouts, inputs, strict=True):
        gpu.attention.plan(layout)
        found.append(gpu.run(q, k, v))
    for one, other in zip(found, expected, strict=True):
        check_close(one, other, LLAMA.dtype)


@pytest.mark.parametrize("shape", [LLAMA, Shape(40, 8, 128), Shape(14, 2, 64)], ids=str)
def test_the_workspace_is_as_large_as_the_library_wants_it(shape: Shape) -> None:
    gpu = OnGpu(shape, 600)
    mixed: Any = gpu.attention._launches.mixed._wrapper  # type: ignore[attr-defined]
    most = eager_bytes(gpu.attention._library.num_processors, shape.heads, shape.dim)
    for requests in (*STEPS.values(), edges(16)):
        layout = Paged(requests, 16).layout()
        host = {
            "qo_indptr": layout.qo_indptr,
            "paged_kv_indptr": layout.kv_indptr,
            "paged_kv_indices": layout.kv_indices,
            "paged_kv_last_page_len": layout.kv_last_page_len,
        }
        wanted, _ = mixed.workspace_size(
            **{name: torch.from_numpy(values) for name, values in host.items()},
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.dim,
            page_size=16,
            causal=True,
            q_data_type=shape.dtype,
        )
        assert wanted <= most
