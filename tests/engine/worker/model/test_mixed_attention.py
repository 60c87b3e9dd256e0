from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.kernels.dtypes import HAS_BFLOAT16_PAIRS
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.kv_tensors import allocate
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.model.mixed_attention import MixedAttention, attention_over
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    KVTensors,
    ModelShape,
    RecordableAttention,
)
from tests.attention_backends import cache_for, holds, maker

HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 4, 2, 16, 4, 60
PLAIN = AttentionSpec(HEADS, KV_HEADS, DIM, 0.25, None)
WINDOWED = AttentionSpec(HEADS, KV_HEADS, DIM, 0.25, 9, has_sinks=True)
CAPPED = AttentionSpec(HEADS, KV_HEADS, DIM, 0.5, None, soft_cap=3.0)
SPECS = (WINDOWED, PLAIN, WINDOWED, CAPPED, PLAIN)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
POOL = NativeThreadPool(1)


SHAPE = ModelShape(2, HEADS, KV_HEADS, DIM, 1, 1, 1, 1, 4096)


def cache_of(num_layers: int, dtype: torch.dtype) -> KVTensors:
    shape = ModelShape(num_layers, HEADS, KV_HEADS, DIM, 1, 1, 1, 1, 4096)
    return allocate(shape, num_layers, BLOCKS, SIZE, dtype)


def make(name: str, spec: AttentionSpec, cache: KVTensors) -> AttentionBackend:
    return maker(name)(spec, cache, POOL)


def run(attention: AttentionBackend, specs: tuple[AttentionSpec, ...], seed: int) -> list[Tensor]:
    """Each layer's output in a step of a prompt of 60 tokens."""
    table = np.arange(BLOCKS, dtype="<i4").tobytes()
    step = Step(StepId(0), (StepEntry(RequestId(0), 0, (0,) * 60, table, None),))
    attention.plan(build_layout(step, LayoutLimits(1, 4096, BLOCKS, SIZE)))
    found = []
    for layer, spec in enumerate(specs):
        generator = torch.Generator().manual_seed(seed + layer)
        fused = torch.randn(60, HEADS + 2 * KV_HEADS, DIM, generator=generator)
        q, k, v = torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)
        sinks = SINKS if spec.has_sinks else None
        found.append(attention.run(layer, q, k, v, None, sinks).clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_each_layer_of_a_mixed_stage_is_computed_as_in_a_stage_of_its_kind(
    name: str, dtype: torch.dtype
) -> None:
    cache = cache_of(len(SPECS), dtype)
    mixed = attention_over(SPECS, cache, lambda spec, part: make(name, spec, part))
    found = run(mixed, SPECS, seed=0)
    for layer, spec in enumerate(SPECS):
        alone = attention_over(
            (spec,), cache_of(1, dtype), lambda spec, part: make(name, spec, part)
        )
        (expected,) = run(alone, (spec,), seed=layer)
        assert torch.equal(found[layer], expected)
    assert all(keys.float().abs().sum() > 0 for keys in cache.keys)


def test_equal_layers_share_one_backend_without_dispatch() -> None:
    cache = cache_of(2, torch.float32)
    made = attention_over((PLAIN, PLAIN), cache, lambda spec, part: make("cpu", spec, part))
    assert not isinstance(made, MixedAttention)


def test_a_mixed_stage_is_recordable_if_all_its_backends_are() -> None:
    cache = cache_of(len(SPECS), torch.float32)
    native = attention_over(SPECS, cache, lambda spec, part: make("cpu", spec, part))
    plain = attention_over(SPECS, cache, lambda spec, part: make("reference", spec, part))
    assert isinstance(native, RecordableAttention)
    assert not isinstance(plain, RecordableAttention)


NARROW = replace(WINDOWED, head_dim=8, has_sinks=False, cache_head_dim=DIM)
WIDE = replace(WINDOWED, num_kv_heads=1, head_dim=2 * DIM, has_sinks=False, cache_head_dim=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("other", [NARROW, WIDE], ids=["smaller heads", "fewer, larger heads"])
def test_layers_with_other_heads_or_the_kv_of_others_are_exact(
    other: AttentionSpec, dtype: torch.dtype
) -> None:
    """Layers 2 and 3 read what layers 1 and 0 have written; the heads of layers 1 and 2 take half a
    slot, or a whole one."""
    specs = (PLAIN, other, replace(other, has_own_kv=False), replace(PLAIN, has_own_kv=False))
    found: list[list[Tensor]] = []
    names = [name for name in ("cpu", "flashinfer", "reference") if holds(name, dtype)]
    for name in names:
        own = cache_for(name, SHAPE, BLOCKS, SIZE, dtype)
        attention = attention_over(specs, own.of_layers((0, 1, 1, 0)), partial(make, name))
        table = np.arange(BLOCKS, dtype="<i4").tobytes()
        step = Step(StepId(0), (StepEntry(RequestId(0), 0, (0,) * 60, table, None),))
        attention.plan(build_layout(step, LayoutLimits(1, 4096, BLOCKS, SIZE)))
        found.append([])
        for layer, spec in enumerate(specs):
            generator = torch.Generator().manual_seed(layer)
            count, dim = spec.num_kv_heads, spec.head_dim
            fused = torch.randn(60, HEADS + 2 * count, dim, generator=generator)
            if spec.has_own_kv:
                q, k, v = torch.split(fused, [HEADS, count, count], dim=1)
                found[-1].append(attention.run(layer, q, k, v, None).clone())
            else:
                q = fused[:, :HEADS].contiguous()
                found[-1].append(attention.run(layer, q, None, None, None).clone())
    near = 2e-2 if dtype in (torch.bfloat16, torch.int8) and HAS_BFLOAT16_PAIRS else 2e-5
    for *others, plain in zip(*found, strict=True):
        for other_way in others:
            torch.testing.assert_close(other_way, plain, rtol=near, atol=near)
