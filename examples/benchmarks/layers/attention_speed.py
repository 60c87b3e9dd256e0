"""The speed of attention on the CPU, by context length, heads and KV dtype.

Prints CPU milliseconds of one layer, summed over the threads, and the bytes or operations per
second; without weights, so that nothing else is measured.

    python -m examples.benchmarks.layers.attention_speed
        [--threads 2] [--seconds 1] [--contexts 128 2048 8192]
"""

import argparse
import time
from typing import NamedTuple

import numpy as np
import torch

from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.attention.backend import CpuAttention
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.kv_tensors import CPU_KV_DTYPES, allocate, bytes_per_block
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import AttentionSpec, ModelShape

BLOCK = 16
LAYERS = 4  # used alternately, so that caches do not hold the KV
DIM = 64


class Heads(NamedTuple):
    """Numbers of query heads and KV heads."""

    name: str
    queries: int
    keys: int


GROUPED, EACH = Heads("14 over 2", 14, 2), Heads("12 over 12", 12, 12)


def cpu_seconds(
    pool: NativeThreadPool,
    heads: Heads,
    dtype: torch.dtype,
    requests: list[tuple[int, int]],
    seconds: float,
) -> float:
    """CPU seconds of one layer for requests of (cached, new) tokens, the minimum of many runs."""
    shape = ModelShape(LAYERS, heads.queries, heads.keys, DIM, 1, 1, 1, 1, 1 << 20)
    pages = [-(-sum(request) // BLOCK) for request in requests]
    cache = allocate(shape, LAYERS, sum(pages), BLOCK, dtype)
    for tensor in cache.in_memory_order():
        tensor.fill_(1)
    tables = np.split(np.random.default_rng(0).permutation(sum(pages)), np.cumsum(pages)[:-1])
    entries = tuple(
        StepEntry(RequestId(i), cached, (0,) * new, tables[i].astype("<i4").tobytes(), None)
        for i, (cached, new) in enumerate(requests)
    )
    layout = build_layout(Step(StepId(0), entries), LayoutLimits(1, 1 << 20, sum(pages), BLOCK))
    spec = AttentionSpec(heads.queries, heads.keys, DIM, DIM**-0.5, None)
    attention = CpuAttention(spec, cache, pool)
    fused = torch.randn(layout.num_tokens, heads.queries + 2 * heads.keys, DIM)
    q, k, v = torch.split(fused, [heads.queries, heads.keys, heads.keys], dim=1)
    attention.plan(layout)
    best, end = float("inf"), time.perf_counter() + seconds
    with pool.awake():
        while best == float("inf") or time.perf_counter() < end:
            start = time.process_time()
            for layer in range(LAYERS):
                attention.run(layer, q, k, v, None)
            best = min(best, (time.process_time() - start) / LAYERS)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together")
    options = parser.parse_args()
    pool = NativeThreadPool(options.threads)
    print("| heads | step | " + " | ".join(CPU_KV_DTYPES) + " | of float32 |")
    print("|---" * (3 + len(CPU_KV_DTYPES)) + "|")
    for heads in (GROUPED, EACH):
        shape = ModelShape(1, heads.queries, heads.keys, DIM, 1, 1, 1, 1, 1)
        for context in options.contexts:
            for name, requests in (
                (f"decode, {options.batch} × {context}", [(context - 1, 1)] * options.batch),
                (f"512 more after {context}", [(context, 512)]),
            ):
                found = [
                    cpu_seconds(pool, heads, dtype, requests, options.seconds)
                    for dtype in CPU_KV_DTYPES.values()
                ]
                read = sum(map(sum, requests)) * bytes_per_block(shape, 1, 1, torch.float32)
                pairs = sum(new * (cached + (new + 1) / 2) for cached, new in requests)
                rate = f"{read / found[0] / 1e9:.0f} GB/s"
                if requests[0][1] > 1:
                    rate = f"{4 * heads.queries * DIM * pairs / found[0] / 1e9:.0f} GFLOP/s"
                figures = " | ".join(f"{seconds * 1e3:.2f}" for seconds in found)
                print(f"| {heads.name} | {name} | {figures} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
