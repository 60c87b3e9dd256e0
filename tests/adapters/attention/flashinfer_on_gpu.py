"""FlashInfer's attention on a real GPU, over a poisoned cache, and what it should have found."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.attention.flashinfer.backend import FlashInferAttention
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import AttentionSpec, ModelShape, RaggedLayout, RopeAngles, StepLimits
from tests.attention_backends import gpu_cache

FP8 = torch.float8_e4m3fn
LIMITS = StepLimits(max_requests=256, max_tokens=4096, max_model_len=33000)
STALE, MAX_FP8 = 1e4, 448.0  # in slots of used pages that no token has

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the library's own
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
        reason="needs a GPU and flashinfer",
    ),
]


class Tolerance(NamedTuple):
    """Against float32 on the same rounded inputs."""

    each: float  # rtol and atol
    whole: float  # of the norm of the difference, relative


TOLERANCES = {torch.float16: Tolerance(1e-3, 1e-3), torch.bfloat16: Tolerance(1e-2, 5e-3)}


@dataclass(frozen=True)
class Shape:
    """Of one attention layer and its cache."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    has_sinks: bool = False
    values_from: int | None = None

    @property
    def kept(self) -> torch.dtype:
        return self.kv_dtype or self.dtype


class OnGpu:
    """A backend with one layer; the last page is the spare one, all others are poisoned."""

    def __init__(self, shape: Shape, num_pages: int, limits: StepLimits = LIMITS) -> None:
        self.shape = shape
        sizes = ModelShape(1, shape.heads, shape.kv_heads, shape.dim, 1, 1, 1, 1, 1)
        sizes = replace(sizes, values_from=shape.values_from)
        self.cache = gpu_cache(sizes, num_pages, shape.page_size, shape.kept, "cuda")
        for pages in (*self.cache.keys, *self.cache.values):
            pages[:-1] = torch.full_like(pages[:-1], nan, dtype=torch.float32).to(shape.kept)
        self.spec = AttentionSpec(
            shape.heads,
            shape.kv_heads,
            shape.dim,
            shape.dim**-0.5,
            shape.window,
            shape.dtype,
            *shape.scales,
            limits,
            has_sinks=shape.has_sinks,
            values_from=shape.values_from,
        )
        self.sinks = torch.linspace(-2, 4, shape.heads, device="cuda") if shape.has_sinks else None
        self.attention = FlashInferAttention(self.spec, self.cache, NativeThreadPool(1))
        self._generator = torch.Generator("cuda").manual_seed(0)

    def noise(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator, device="cuda")

    def fill(self, layout: RaggedLayout) -> None:
        """Noise for what requests have cached, stale numbers behind it, NaN in other pages."""
        for cache in (*self.cache.keys, *self.cache.values):
            cache[:-1] = torch.full_like(cache[:-1], nan, dtype=torch.float32).to(cache.dtype)
            pages = torch.from_numpy(layout.kv_indices).long().cuda()
            stale = torch.full((len(pages), *cache.shape[1:]), self._stale, device="cuda")
            _put(cache, pages, stale)
            size = cache.shape[1]
            for i in range(layout.num_requests):
                cached = _cached_slots(layout, i)
                rows = self.noise(len(cached), *cache.shape[2:])
                _put(cache, (cached // size, cached % size), rows)

    def step(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """New q, k and v, side by side."""
        shape = self.shape
        fused = self.noise(num_tokens, shape.heads + 2 * shape.kv_heads, shape.dim)
        q, k, v = torch.split(
            fused.to(shape.dtype), [shape.heads, shape.kv_heads, shape.kv_heads], dim=1
        )
        return q, k, v

    def run(self, q: Tensor, k: Tensor, v: Tensor, turn: RopeAngles | None = None) -> Tensor:
        with torch.inference_mode(), poisoned():
            return self.attend(q, k, v, turn)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, turn: RopeAngles | None = None) -> Tensor:
        """Without v where values are a part of the keys."""
        own_v = v if self.shape.values_from is None else None
        return self.attention.run(0, q, k, own_v, turn, self.sinks)

    def expected(self, layout: RaggedLayout, q: Tensor) -> Tensor:
        """Attention in float32 over what lies in the cache, one request after the other."""
        out = torch.empty((*q.shape[:2], self.spec.value_dim), device="cuda")
        for i in range(layout.num_requests):
            rows = slice(int(layout.qo_indptr[i]), int(layout.qo_indptr[i + 1]))
            first, end = int(layout.kv_indptr[i]), int(layout.kv_indptr[i + 1])
            pages = torch.from_numpy(layout.kv_indices[first:end]).long().cuda()
            out[rows] = self._attend(q[rows].float(), pages, int(layout.kv_len[i]))
        return out

    def _attend(self, q: Tensor, pages: Tensor, length: int) -> Tensor:
        shape = self.shape
        k, v = (
            (
                cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1)[:length].float() * by
            ).repeat_interleave(shape.heads // shape.kv_heads, dim=1)
            for cache, by in zip(
                (self.cache.keys[0], (self.cache.values or self.cache.keys)[0]),
                shape.scales,
                strict=True,
            )
        )
        v = v[..., shape.values_from or 0 :]
        ends = torch.arange(length - len(q), length, device="cuda")
        back = ends[:, None] - torch.arange(length, device="cuda")
        hidden = (back < 0) | (back >= (shape.window or length))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.spec.scale
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            column = self.sinks[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, column), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)

    @property
    def _stale(self) -> float:
        return MAX_FP8 if self.shape.kept == FP8 else STALE


def _put(into: Tensor, at: Tensor | tuple[Tensor, Tensor], rows: Tensor) -> None:
    """As bytes, since indexing does not know 8-bit floats."""
    into.view(torch.uint8)[at] = rows.to(into.dtype).view(torch.uint8)


def _cached_slots(layout: RaggedLayout, i: int) -> Tensor:
    """Slots of the tokens that request i has had before the step."""
    size = layout.block_size
    pages = layout.kv_indices[int(layout.kv_indptr[i]) : int(layout.kv_indptr[i + 1])]
    new = int(layout.qo_indptr[i + 1] - layout.qo_indptr[i])
    positions = np.arange(int(layout.kv_len[i]) - new)
    slots = pages[positions // size].astype(np.int64) * size + positions % size
    return torch.from_numpy(slots).cuda()


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated has NaN in it, so that a row that is never written is found."""
    real = torch.empty

    def empty(*sizes: object, **options: object) -> Tensor:
        tensor: Tensor = real(*sizes, **options)  # type: ignore[call-overload]
        return tensor.fill_(nan) if tensor.is_floating_point() else tensor

    with patch.object(torch, "empty", empty):
        yield


def check_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerances of the dtype, each number and all of them."""
    each, whole = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=each, atol=each)
    difference = (found.float() - expected).norm() / expected.norm()
    assert float(difference) < whole
