"""Times attention of decodes by our Triton kernel and by FlashInfer's FA2.

    python -m examples.benchmarks.gpu.decodes [--json FILE]

A layer of Llama-3.1-8B: 32 heads of 128 over 8 KV heads, pages of 16 tokens. A case is
DECODESxCONTEXT, with +LONGEST for one more; 8 layers of cache (32 of one decode) are read in turn
in one CUDA graph, so that none stays in the L2 cache. `floor` is the time that reading the keys and
values takes at 4.35 TB/s, what an H200 reaches.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from adapters.attention.flashinfer.backend import FlashInferAttention
from adapters.attention.flashinfer.library import FlashInfer
from adapters.attention.flashinfer.ports import DecodeKernels
from engine.step import Step, StepId
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.cuda.kernels.reference import FP8
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import AttentionSpec, KVTensors, StepLimits
from examples.benchmarks.gpu.mixed_steps import paged
from examples.benchmarks.gpu.products import seconds

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
RATE = 4.35e12
CASES = (
    *("1x1024", "8x1024", "64x1024", "128x1024", "256x1024", "16x8192", "64x4096"),
    "40x1024+32768",
)
LAYERS = {1: 32}


class WithoutKernels(FlashInfer):
    """FlashInfer, whose FA2 computes decodes."""

    def decode_kernels(self) -> DecodeKernels | None:
        return None


def lengths_of(case: str) -> list[int]:
    equal, _, longest = case.partition("+")
    count, context = map(int, equal.split("x"))
    return [context] * count + ([int(longest)] if longest else [])


def measure(case: str, kv_dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of a layer: the floor, FA2 and ours."""
    lengths = lengths_of(case)
    count, half = len(lengths), torch.bfloat16
    layers, blocks = LAYERS.get(count, 8), sum(-(-each // PAGE) for each in lengths)
    step = Step(StepId(0), paged([(each - 1, 1) for each in lengths], PAGE))
    layout = build_layout(step, LayoutLimits(100, max(lengths), blocks, PAGE))
    whole = torch.empty(2, layers, blocks + 1, PAGE, KV_HEADS, DIM, device="cuda", dtype=kv_dtype)
    for each in whole.flatten(0, 1):
        each.copy_(torch.randn(each.shape, device="cuda", dtype=half))
    cache = KVTensors(tuple(whole[0]), tuple(whole[1]), 1)
    limits = StepLimits(count, 2048, max(lengths))
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, None, half, limits=limits)
    fused = torch.randn(count, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=half)
    q = fused[:, :HEADS]  # strided rows, as in a worker
    read = 2 * sum(lengths) * KV_HEADS * DIM * kv_dtype.itemsize
    found = {"floor": read / RATE * 1e6}
    place = q.device
    for name, library in (("FA2", WithoutKernels), ("ours", FlashInfer)):
        attention = FlashInferAttention(spec, cache, NativeThreadPool(1), library(place, half, ""))
        attention.plan_captured(layout)

        def work(attention: FlashInferAttention = attention) -> None:
            for pages in attention._pages:
                out = torch.empty((count, HEADS, DIM), dtype=half, device=place)
                attention._launch.run(q, pages, out)

        with torch.inference_mode():
            time = seconds(work, layers * max(read / RATE, 5e-6)) / layers
        found[name] = time * 1e6
    return {name: round(time, 1) for name, time in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for kv_dtype in (torch.bfloat16, FP8):
        for case in arguments.cases:
            key = f"{case} {str(kv_dtype).removeprefix('torch.')}"
            found[key] = measure(case, kv_dtype)
            print(f"{key}: {found[key]}", flush=True)
    if arguments.json:
        result = {"device": torch.cuda.get_device_name(), "unit": "µs of a layer", "decodes": found}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
