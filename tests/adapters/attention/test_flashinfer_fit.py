import importlib.util
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.attention import BACKENDS
from adapters.attention.flashinfer.backend import FlashInferAttention
from adapters.attention.flashinfer.fit import (
    latent_heads,
    missing_requirement,
    unsupported_shape,
)
from engine.errors import StartupError
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.device import RUNS_ON
from engine.worker.ports import AttentionSpec, KVTensors

HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn


def spec(
    heads: int = 32, kv_heads: int = 8, head_dim: int = 128, dtype: torch.dtype = HALF
) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, 1.0, None, dtype)


@pytest.mark.parametrize("kv_dtype", [HALF, FP8])
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        (12, 12, 64),
        (14, 2, 64),
        (28, 4, 128),
        (40, 8, 128),
        (64, 1, 256),
        (32, 32, 80),  # Phi-2
        (32, 32, 96),  # Phi-3-mini
        (16, 16, 192),  # MLA, expanded
        (8, 1, 512),  # Gemma 4
    ],
)
def test_the_shapes_of_the_families_fit(
    heads: int, kv_heads: int, head_dim: int, page_size: int, kv_dtype: torch.dtype
) -> None:
    assert unsupported_shape(spec(heads, kv_heads, head_dim), kv_dtype, page_size) == ""


@pytest.mark.parametrize(
    ("wrong", "kv_dtype", "named"),
    [
        (spec(dtype=torch.float32), torch.float32, "dtype float32 .*--attention reference"),
        (spec(), torch.float16, "a KV cache in float16 with dtype bfloat16 .*--kv-cache-dtype"),
        (spec(dtype=torch.float16), HALF, "a KV cache in bfloat16 with dtype float16"),
        (spec(head_dim=84), HALF, "head_dim 84 .*multiples of 8 up to 512 .*--attention reference"),
        (spec(head_dim=88), FP8, "head_dim 88 .*multiples of 16 up to 512 are"),
        (spec(head_dim=520), HALF, "head_dim 520 .*--attention reference"),
        (spec(heads=10, kv_heads=4), HALF, "10 attention heads are not a multiple of 4 KV heads"),
    ],
)
def test_what_has_no_kernel_is_named(
    wrong: AttentionSpec, kv_dtype: torch.dtype, named: str
) -> None:
    line = unsupported_shape(wrong, kv_dtype, 16)
    assert "\n" not in line
    cache = KVTensors((torch.zeros((1, 16, 2, 8), dtype=kv_dtype),), ())
    with pytest.raises(StartupError, match=f"attention 'flashinfer' cannot be used: {named}"):
        FlashInferAttention(wrong, cache, NativeThreadPool(1))


LATENTS = AttentionSpec(128, 1, 576, 1.0, None, HALF, values_from=64)


def test_latent_vectors_fit_with_any_number_of_heads_up_to_128() -> None:
    for heads in (1, 10, 16, 20, 128):
        assert unsupported_shape(replace(LATENTS, num_heads=heads), HALF, 16) == ""
    assert [latent_heads(count) for count in (1, 2, 5, 20, 128)] == [1, 2, 8, 32, 128]


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "named"),
    [
        ({"head_dim": 288, "values_from": 32}, HALF, "of 256 [+] 32 .* only those of 512 [+] 64"),
        ({"is_batch_invariant": True}, HALF, "--batch-invariant"),
        ({}, FP8, "in 8 bits"),
        ({"num_heads": 136}, HALF, "136 heads .* at most 128"),
        ({"window": 9}, HALF, "a sliding window, a soft cap or sinks"),
    ],
)
def test_latent_vectors_that_have_no_kernel_are_named(
    changes: dict[str, Any], kv_dtype: torch.dtype, named: str
) -> None:
    assert re.search(named, unsupported_shape(replace(LATENTS, **changes), kv_dtype, 16))


def test_without_a_gpu_or_the_library_that_is_what_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert missing_requirement(0) == "there is no GPU that torch can use"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert missing_requirement(1) == "the GPU has compute capability 7.5; 8.0 or later is needed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_requirement(1) == "flashinfer is not installed (pip install 'podway[cuda]')"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def broken(name: str) -> None:
        raise ImportError("no module named 'tvm_ffi'")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert missing_requirement(1) == "flashinfer cannot be imported: no module named 'tvm_ffi'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_class_can_be_asked_where_there_is_no_gpu() -> None:
    assert FlashInferAttention.why_not(spec(), HALF, 16) == "there is no GPU that torch can use"


def test_every_backend_but_the_reference_is_of_one_kind_of_device() -> None:
    assert BACKENDS.keys() - RUNS_ON.keys() == {"reference"}
