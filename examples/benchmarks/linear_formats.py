"""The linears of a model in each weight format of the CPU, alone: time for 1, 8 and 32 rows.

Prints CPU time of one thread, which other processes on the machine disturb less than elapsed time.

    python -m examples.benchmarks.linear_formats [--rounds 25] [--rows 1 8 32]
"""

import argparse
import time

import torch

from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.linears import FORMATS, linears_of
from engine.worker.cpu.linears.packed import PackedLinear
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool

HIDDEN, INNER, LAYERS, VOCABULARY = 768, 2048, 12, 32000
SHAPES = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="of which the fastest counts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of a step")
    return parser.parse_args()


def record(pool: NativeThreadPool, name: str, rows: int) -> tuple[KernelGraph, list[object]]:
    """All linears in one graph, and what must outlive it."""
    pages, linears = WeightPages(), linears_of(name)[name]
    inputs = {size: torch.randn(rows, size) for size in (HIDDEN, INNER)}
    kept: list[object] = [inputs]
    with pool.recording() as graph:
        for outputs, size in [*SHAPES * LAYERS, (VOCABULARY, HIDDEN)]:
            packed = linears.pack([torch.randn(outputs, size) / 50], pages)
            linear = PackedLinear(pool, linears, packed, None)
            linear(inputs[size])
            kept.append(linear)
    return graph, kept


def main() -> None:
    options = parse()
    pool = NativeThreadPool(1)
    elements = LAYERS * sum(outputs * size for outputs, size in SHAPES) + VOCABULARY * HIDDEN
    print(f"{elements:,} matrix elements, 1 thread")
    for name in FORMATS:
        for rows in options.rows:
            graph, _kept = record(pool, name, rows)
            seconds = []
            for _ in range(options.rounds):
                began = time.thread_time()
                pool.replay(graph)
                seconds.append(time.thread_time() - began)
            rate = 2 * rows * elements / min(seconds) / 1e9
            print(f"{name:9} {rows:3} rows {1e3 * min(seconds):8.2f} ms {rate:6.0f} GFLOP/s")


if __name__ == "__main__":
    main()
