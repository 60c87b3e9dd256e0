"""Steps over shuffled pages, and FlashInfer's attention on a stand-in to plan them with."""

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from adapters.attention.flashinfer.backend import FlashInferAttention
from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import AttentionSpec, KVTensors, ModelShape, RaggedLayout, StepLimits
from tests.attention_backends import gpu_cache
from tests.flashinfer_stand_in import StandIn

LIMITS = StepLimits(max_requests=8, max_tokens=128, max_model_len=128)
MAX_POSITIONS = 1 << 20


class Made(NamedTuple):
    """A backend of one layer, with its stand-in library and KV tensors."""

    attention: FlashInferAttention
    stand_in: StandIn
    cache: KVTensors
    spec: AttentionSpec

    def last_plan(self, name: str) -> dict[str, Any]:
        return next(given for each, given in reversed(self.stand_in.calls) if each == name)


class Paged(NamedTuple):
    """Requests as (tokens cached before, new tokens), on pages of their own and shared ones."""

    requests: tuple[tuple[int, int], ...]
    page_size: int
    num_shared: int = 0  # first pages that all requests have
    seed: int = 0

    @property
    def tables(self) -> list[list[int]]:
        """The pages of each request, two more than it needs."""
        counts = [-(-sum(request) // self.page_size) + 2 for request in self.requests]
        ids = np.random.default_rng(self.seed).permutation(self.num_pages).tolist()
        shared, ids = ids[: self.num_shared], ids[self.num_shared :]
        tables = []
        for count in counts:
            own = max(0, count - self.num_shared)
            tables.append(shared[:count] + ids[:own])
            ids = ids[own:]
        return tables

    @property
    def num_pages(self) -> int:
        needed = (-(-sum(request) // self.page_size) + 2 for request in self.requests)
        return sum(needed) + self.num_shared

    def layout(self) -> RaggedLayout:
        entries = (
            StepEntry(
                RequestId(i), cached, (0,) * new, np.array(table, dtype="<i4").tobytes(), None
            )
            for i, ((cached, new), table) in enumerate(zip(self.requests, self.tables, strict=True))
        )
        limits = LayoutLimits(1, MAX_POSITIONS, self.num_pages, self.page_size)
        return build_layout(Step(StepId(0), tuple(entries)), limits)

    def slots(self, i: int) -> list[int]:
        """Where the tokens of a request are after the step, found one by one."""
        table, size = self.tables[i], self.page_size
        return [
            table[position // size] * size + position % size
            for position in range(sum(self.requests[i]))
        ]


requests = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)) | st.tuples(st.integers(0, 60), st.just(1)),
    min_size=1,
    max_size=6,
)
decodes = st.lists(st.tuples(st.integers(0, 60), st.just(1)), min_size=1, max_size=6)


def paged(asked: st.SearchStrategy[list[tuple[int, int]]]) -> st.SearchStrategy[Paged]:
    return st.builds(
        Paged,
        requests=asked.map(lambda each: tuple(sorted(each, key=lambda request: request[1] > 1))),
        page_size=st.sampled_from([1, 3, 4, 16]),
        num_shared=st.integers(0, 3),
        seed=st.integers(0, 99),
    )


def make(
    num_pages: int,
    page_size: int,
    *,
    kv_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    limits: StepLimits = LIMITS,
    is_batch_invariant: bool = False,
    dim: int = 8,
    has_decode_kernels: bool = True,
) -> Made:
    """With a spare page behind the others; four heads share two of keys and values, narrower than
    a kernel's."""
    shape = ModelShape(1, 4, 2, dim, 1, 1, 1, 1, 1)
    cache = gpu_cache(shape, num_pages, page_size, kv_dtype)
    generator = torch.Generator().manual_seed(0)
    for pages in (*cache.keys, *cache.values):
        pages.copy_(torch.randn(pages.shape, generator=generator).to(kv_dtype))
    spec = AttentionSpec(4, 2, dim, 0.3, window, dtype, *scales, limits, is_batch_invariant)
    stand_in = StandIn(has_decode_kernels=has_decode_kernels)
    made = FlashInferAttention(spec, cache, NativeThreadPool(1), stand_in)
    return Made(made, stand_in, cache, spec)
