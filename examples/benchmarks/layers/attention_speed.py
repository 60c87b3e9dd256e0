"""The speed of attention on the CPU, by context length, heads and KV dtype.

Prints CPU milliseconds of one layer, summed over the threads, and the bytes or operations per
second; without weights, so that nothing else is measured.

    python -m examples.benchmarks.layers.attention_speed
        [--threads 2] [--seconds 1] [--contexts 128 2048 8192] [--heads 14:2:64] [--json FILE]
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from engine.step import RequestId, Step, StepEntry, StepId
from engine.worker.cpu.attention.backend import CpuAttention
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.kv_tensors import CPU_KV_DTYPES, allocate, bytes_per_block
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import AttentionSpec, ModelShape
from examples.benchmarks.server.start_time import cpu_name

BLOCK = 16
LAYERS = 4  # used alternately, so that caches do not hold the KV


class Heads(NamedTuple):
    """Numbers of query heads, of KV heads, and of their dimensions."""

    queries: int
    keys: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> "Heads":
        return cls(*map(int, text.split(":")))

    def __str__(self) -> str:
        return f"{self.queries} over {self.keys} of {self.dim}"


HEADS = (Heads(14, 2, 64), Heads(12, 12, 64), Heads(32, 8, 128))


def cpu_seconds(
    pool: NativeThreadPool,
    heads: Heads,
    dtype: torch.dtype,
    requests: list[tuple[int, int]],
    seconds: float,
) -> float:
    """CPU seconds of one layer for requests of (cached, new) tokens, the minimum of many runs."""
    shape = ModelShape(LAYERS, heads.queries, heads.keys, heads.dim, 1, 1, 1, 1, 1 << 20)
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
    spec = AttentionSpec(heads.queries, heads.keys, heads.dim, heads.dim**-0.5, None)
    attention = CpuAttention(spec, cache, pool)
    fused = torch.randn(layout.num_tokens, heads.queries + 2 * heads.keys, heads.dim)
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
    parser.add_argument("--heads", type=Heads.parse, nargs="+", default=HEADS, metavar="Q:KV:DIM")
    parser.add_argument("--json", type=Path, help="write the milliseconds to this file")
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    pool = NativeThreadPool(options.threads)
    print("| heads | step | " + " | ".join(CPU_KV_DTYPES) + " | of float32 |")
    print("|---" * (3 + len(CPU_KV_DTYPES)) + "|")
    for heads in options.heads:
        shape = ModelShape(1, heads.queries, heads.keys, heads.dim, 1, 1, 1, 1, 1)
        for context in options.contexts:
            for name, requests in (
                (f"decode, {options.batch} × {context}", [(context - 1, 1)] * options.batch),
                (f"512 more after {context}", [(context, 512)]),
            ):
                times = {
                    kv: cpu_seconds(pool, heads, dtype, requests, options.seconds)
                    for kv, dtype in CPU_KV_DTYPES.items()
                }
                read = sum(map(sum, requests)) * bytes_per_block(shape, 1, 1, torch.float32)
                pairs = sum(new * (cached + (new + 1) / 2) for cached, new in requests)
                rate = f"{read / times['float32'] / 1e9:.0f} GB/s"
                if requests[0][1] > 1:
                    products = 4 * heads.queries * heads.dim * pairs
                    rate = f"{products / times['float32'] / 1e9:.0f} GFLOP/s"
                figures = " | ".join(f"{each * 1e3:.2f}" for each in times.values())
                print(f"| {heads} | {name} | {figures} | {rate} |", flush=True)
                found.setdefault(str(heads), {})[name] = {kv: t * 1e3 for kv, t in times.items()}
    if options.json:
        written = {"cpu": cpu_name(), "cpu_milliseconds_of_a_layer": found}
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
